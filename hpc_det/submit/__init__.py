"""Submission: from a plan to job scripts to job ids. submitit passes the scripts to the scheduler."""
