"""A stand-in for a PBS site that runs jobs for real on this machine, held to what a real OpenPBS was recorded doing.

The way of a job: `qsub` (qsub.py) reads directives and options and sends a `Submission` over the site's socket
(client.py) to the one process of the site (server.py). That process is PBS server, scheduler (scheduler.py) and the
moms of all nodes (mom.py) at once; job_life.py is what happens to one job from its start to its end or requeue.
`qstat` and the others (qstat.py, commands.py, qmgr.py, pbsnodes.py) ask and print; `pbsdsh` and `pbs_tmrsh` (tm.py)
start more processes on a job's nodes. `tests/labs/pbs_lab.py` is the whole of it as an object for tests.

Only `recorded/` says what is right: where it is silent, the comments say so.
"""
