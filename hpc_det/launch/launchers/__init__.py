"""What launchers share, and how what they start becomes a rank.

The launchers themselves lie in the folder above, where entrypoints name them: `python3 -m hpc_det.launch.mpi`.

    arguments      how each begins, and their command line
    nodes          those of a gang's nodes work together, where the one on node 0 leads; mpirun's remote shell
    mpi_rank       a process of mpirun's becomes a rank
    rank           the same of srun's and DeepSpeed's, and a script under a parent that tells the agent about it
"""
