#!/bin/bash
# experiment 12: digits
# Written by hpc_det. To start the same job by hand, run `qsub` with this file.
#PBS -N digits
#PBS -l select=2:ncpus=12:ngpus=4:mpiprocs=1:ompthreads=3
#PBS -l place=scatter
#PBS -r y
#PBS -S /bin/bash
#PBS -k oed
#PBS -j oe
#PBS -o /home/ada/hpc_det/experiments/12/jobs/1.log

# ignore stop signals until the job process handles them
trap '' TERM USR1 USR2

cd /home/ada/hpc_det/experiments/12 || exit

export PATH=/opt/venv/bin:"$PATH"

# the job process starts one agent per node
exec /opt/venv/bin/python -m hpc_det.launch.job /home/ada/hpc_det/experiments/12 1 -- \
  /opt/venv/bin/python -m hpc_det.launch.on_nodes pbsdsh /home/ada/hpc_det/experiments/12/jobs \
  /opt/venv/bin/python -m hpc_det.launch.agent
