"""From a plan to a script to a job id, with submitit to carry the script there."""
