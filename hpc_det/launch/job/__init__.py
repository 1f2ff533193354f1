"""The job process, one per job: its workers, the attempts that they make at trials, and requeueing of the job."""
