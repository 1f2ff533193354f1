"""PBS Pro and OpenPBS for any submitit program: `submitit.AutoExecutor(folder, cluster="pbs")`.

  executor          the executor of a program, its parameters as directives of qsub; submitit's entry point
  job               a job as the submitting program sees it, and the states of all its jobs
  job_environment   the environment of a task, which submitit reads, and the task's signal handlers
  in_job            the job's first process: starts the tasks, watches time and signals, submits the next job
  on_node           the tasks of one node
  paths             every file name

The parsers of qstat's answers, ids, and the start of processes on other nodes are in hpc_det.schedulers.pbs.

A job cannot requeue itself in PBS. So a new job continues it, under the id of the first: the first job's pickle and
result keep their names, and the file `next` contains the id of the PBS job that runs now.
"""
