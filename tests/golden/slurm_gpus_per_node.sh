#!/bin/bash
# experiment 12: digits
# Written by hpc_det. To start the same job by hand, run `sbatch` with this file.
#SBATCH --job-name=digits
#SBATCH --nodes=2
#SBATCH --ntasks=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=12
#SBATCH --gpus-per-node=4
#SBATCH --signal=USR2@90
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=/home/ada/hpc_det/experiments/12/jobs/1.log
#SBATCH --chdir=/home/ada/hpc_det/experiments/12

# ignore stop signals until the job process handles them
trap '' TERM USR1 USR2

export PATH=/opt/venv/bin:"$PATH"

# the job process starts one agent per node
exec /opt/venv/bin/python -m hpc_det.launch.job /home/ada/hpc_det/experiments/12 1 -- \
  srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=12 --kill-on-bad-exit=1 --wait=60 --export=ALL \
  /opt/venv/bin/python -m hpc_det.launch.agent
