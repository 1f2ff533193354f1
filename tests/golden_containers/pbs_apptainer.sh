#!/bin/bash
# experiment 12: digits
# Written by hpc_det. `qsub` with this file by hand does the same job.
#PBS -N digits
#PBS -l select=2:ncpus=12:ngpus=4:mpiprocs=1:ompthreads=3
#PBS -l place=scatter
#PBS -r y
#PBS -S /bin/bash
#PBS -k oed
#PBS -j oe
#PBS -o /home/ada/hpc_det/experiments/12/jobs/1.log

# a stop signal before the job listens does not end it
trap '' TERM USR1 USR2

cd /home/ada/hpc_det/experiments/12 || exit

export PATH=/opt/venv/bin:"$PATH"

# one node agent per node, for each attempt
exec /opt/venv/bin/python -m hpc_det.launch.job /home/ada/hpc_det/experiments/12 1 -- \
  /opt/venv/bin/python -m hpc_det.launch.on_nodes pbsdsh /home/ada/hpc_det/experiments/12/jobs \
  /opt/venv/bin/python -m hpc_det.launch.agent
