"""A stand-in for a PBS site that runs real jobs on this machine, and behaves as a real OpenPBS was recorded to behave.

The way of a job: `qsub` (qsub.py) reads directives and options and sends a `Submission` over the site's socket
(client.py) to the one process of the site (server.py). That process is PBS server, scheduler (scheduler.py) and the
moms of all nodes (mom.py) at once; job_life.py handles a job from its start to its end or requeue. `qstat` and the
other commands (qstat.py, commands.py, qmgr.py, pbsnodes.py) send requests and print the answers; `pbsdsh` and
`pbs_tmrsh` (tm.py) start more processes on a job's nodes. `tests/labs/pbs_lab.py` is the whole site as an object for
tests.

Only `recorded/` defines the right behaviour; comments mark behaviour that was not recorded.
"""
