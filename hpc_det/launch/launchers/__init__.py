"""Code that the launchers share, and modules that turn the processes of other launchers into ranks.

The launchers themselves are in the parent folder, where entrypoints name them: `python3 -m hpc_det.launch.mpi`.

    arguments   the start of each launcher, and their command line
    nodes       cooperation of a gang's launchers, led by node 0's; the remote shell for mpirun
    mpi_rank    turns a process that mpirun has started into a rank
    rank        the same for srun and DeepSpeed; the parent process of a script, which reports its end to the agent
"""
