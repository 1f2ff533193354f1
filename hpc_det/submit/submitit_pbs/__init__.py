"""PBS Pro and OpenPBS for any submitit program: `submitit.AutoExecutor(folder, cluster="pbs")`.

  executor          the executor of a program, its parameters as directives of qsub; submitit's entry point
  job               a job as a program holds it, and the state of its jobs
  job_environment   read by submitit in every task, which also sets its signal handlers here
  in_job            the job's first process: starts the tasks, watches time and signals, submits the next job
  on_node           the tasks of one node
  paths             every file name

Answers of qstat, ids and the way to other nodes are in hpc_det.schedulers.pbs, as for all jobs of hpc_det.

A job cannot requeue itself in PBS. So a new job continues it, under the id of the first: the first job's pickle and
result keep their names, and the file `next` contains the id of the PBS job that runs now.
"""
