"""Once per job, on its first node: workers, the attempts that each makes at a trial, and requeueing the job."""
