"""Slurm: its commands, the parsers of their output, the flags of a job, and the queue."""
