"""PBS Pro and OpenPBS for any submitit program: `submitit.AutoExecutor(folder, cluster="pbs")`.

    executor         what a program submits with; found by submitit's entry point
    parameters       what may be asked for -> qsub's directives
    job, watcher     what a program holds, and what it learns of the job's state
    qstat            one question to PBS for all jobs
    job_environment  who am I: read by submitit in every task
    in_job           the job's first process: starts the tasks, watches the time and the signals, comes back
    on_node          the tasks of one node
    environment      variables on their way to another machine, as a file
    ids, paths       `12[3].server` <-> `12_3`, and every file name

A job cannot requeue itself in PBS. So a new job goes on for it, under the id of the first: the first job's pickle and
result keep their names, and the file `next` says which job of PBS runs for it now.
"""
