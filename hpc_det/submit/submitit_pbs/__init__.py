"""PBS Pro and OpenPBS for any submitit program: `submitit.AutoExecutor(folder, cluster="pbs")`.

    executor         what a program submits with, and what it may ask for -> qsub's directives; submitit's entry point
    job              what a program holds, and what it learns of the state of its jobs
    job_environment  who am I: read by submitit in every task, which also sets its signal handlers here
    in_job           the job's first process: starts the tasks, watches the time and the signals, submits the next job
    on_node          the tasks of one node
    paths            every file name

What qstat answers, ids and the way to other nodes are hpc_det.schedulers.pbs', as for all jobs of hpc_det.

A job cannot requeue itself in PBS. So a new job goes on for it, under the id of the first: the first job's pickle and
result keep their names, and the file `next` says which job of PBS runs for it now.
"""
