"""The job process, one per job on its first node: workers, the attempts that each makes at a trial, requeueing the
job.
"""
