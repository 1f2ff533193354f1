"""hpc-det job: the scheduler's queue, and the places of one's jobs in it."""

from hpc_det.cli.job.commands import job as job
