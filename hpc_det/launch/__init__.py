"""The processes on the nodes of a job, standard library only, from the batch script to the ranks.

A job process (`job`) runs once per job, an agent (`agent`) once per node, then a launcher, and `rank` once per rank.

    job         the job process, its workers, their attempts at trials, requeueing
    agent       starts the entrypoint on its node, receives stop signals, ends the ranks when one is lost
    watch       supervision of a gang by its agents: health checks, lost nodes, hangs
    launchers   code that the launchers share

An entrypoint names a launcher: `direct`, `torch_distributed`, `mpi`, `srun`, `deepspeed` or `horovod`. A custom
launcher may use `wrap_rank` to prefix the output of each rank with its number.
"""
