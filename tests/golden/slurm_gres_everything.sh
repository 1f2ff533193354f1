#!/bin/bash
# experiment 12: Größe 1/2; it's "new"
# Written by hpc_det. To start the same job by hand, run `sbatch` with this file.
#SBATCH "--job-name=Größe 1/2; it's \"new\""
#SBATCH --nodes=2
#SBATCH --ntasks=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=12
#SBATCH --gres=gpu:a100:4
#SBATCH --mem=16G
#SBATCH --partition=low
#SBATCH --account=physics
#SBATCH --qos=normal
#SBATCH "--constraint=[rack1|rack2]&nvlink"
#SBATCH --nice=1800
#SBATCH --time=90
#SBATCH --signal=USR2@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=/home/ada/hpc_det/experiments/12/jobs/1.log
#SBATCH --chdir=/home/ada/hpc_det/experiments/12
#SBATCH --exclusive "--comment=two words"

# ignore stop signals until the job process handles them
trap '' TERM USR1 USR2

module load gcc/12 || exit
module load cuda/12.4 || exit
ulimit -n 4096
export NCCL_DEBUG=WARN
export PATH=/opt/venv/bin:"$PATH"

# the job process starts one agent per node
exec /opt/venv/bin/python -m hpc_det.launch.job /home/ada/hpc_det/experiments/12 1 -- \
  srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=12 --kill-on-bad-exit=1 --wait=60 --export=ALL --mpi=none \
  /opt/venv/bin/python -m hpc_det.launch.agent
