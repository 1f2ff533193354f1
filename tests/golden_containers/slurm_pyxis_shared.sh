#!/bin/bash
# experiment 12: digits
# Written by hpc_det. To start the same job by hand, run `sbatch` with this file.
#SBATCH --job-name=digits
#SBATCH --nodes=1
#SBATCH --ntasks=1
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
  srun --nodes=1 --ntasks=1 --ntasks-per-node=1 --cpus-per-task=6 --exact --mem=0 --gpus-per-node=2 --kill-on-bad-exit=1 --wait=60 --export=ALL '--container-image=nvcr.io#nvidia/pytorch:26.01-py3' '--container-mounts=/home/ada/hpc_det/experiments/12:/home/ada/hpc_det/experiments/12:rprivate,/PACKAGE:/opt/hpc-det/hpc_det:ro+rprivate,/dev/infiniband:/dev/infiniband:rprivate,/data/my digits:/digits:ro+rprivate' --container-workdir=/home/ada/hpc_det/experiments/12/code \
  env PYTHONPATH=/opt/hpc-det python3 -m hpc_det.launch.agent
