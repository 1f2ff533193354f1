"""The processes on the nodes of a job, from the batch script to the ranks.

All but the ranks use the standard library only. The batch script starts one job process (`job`). For each attempt the
job process has one agent (`agent`) started on each node. The agent runs the experiment's entrypoint, which is a
launcher or starts one, and the launcher starts the ranks (`rank`).

    job         the job process, its workers, their attempts at trials, requeueing
    agent       starts the entrypoint on its node, receives stop signals, ends the ranks when one is lost
    watch       supervision of a gang by its agents: health checks, lost nodes, hangs
    launchers   code that the launchers share

An entrypoint names a launcher: `direct`, `torch_distributed`, `mpi`, `srun`, `deepspeed` or `horovod`. A custom
launcher may use `wrap_rank` to prefix the output of each rank with its number.
"""
