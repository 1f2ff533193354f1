"""From a plan to a script to a job id: one scheduler a file, and submitit to carry the script there."""
