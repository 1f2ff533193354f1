"""The job process, one per job: its workers, the attempts that each makes at a trial, requeueing the job."""
