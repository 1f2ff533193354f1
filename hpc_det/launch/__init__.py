"""On the nodes of a job: `job` once per job, `agent` once per node, a launcher, `rank` once per rank.

Standard library only. What the folders and modules are:

    job         workers, their attempts at trials, requeueing
    agent       starts the entrypoint on its node, hears of stops, and ends when a rank is lost
    watch       what the agents and ranks of a gang do to learn that one of them is not well

    launchers   what the launchers share

Launchers are what an entrypoint names: `direct`, `torch_distributed`, `mpi`, `srun`, `deepspeed` and `horovod`, with
`wrap_rank` to mark what ranks print.
"""
