#!/bin/bash
# experiment 12: Größe 1/2; it's "new"
# Written by hpc_det. To start the same job by hand, run `qsub` with this file.
#PBS -N Gr__e_1_2__it_s__new_
#PBS -l select=2:ncpus=12:ngpus=4:gpu_type=a100:mpiprocs=1:ompthreads=3:mem=16gb:nvlink=True:cpu_type=milan
#PBS -q low
#PBS -A physics
#PBS -p -180
#PBS -l walltime=25:30:00
#PBS -l qos=high
#PBS -r y
#PBS -S /bin/bash
#PBS -k oed
#PBS -j oe
#PBS -o "/home/a b/experiments/12/jobs/1.log"
#PBS -P proj -W "group_list=two words" -l place=scatter:excl

# ignore stop signals until the job process handles them
trap '' TERM USR1 USR2

cd '/home/a b/experiments/12' || exit

module load gcc/12 || exit
module load cuda/12.4 || exit
ulimit -n 4096
export NCCL_DEBUG=WARN
export PATH=/opt/venv/bin:"$PATH"

# the job process starts one agent per node
exec /opt/venv/bin/python -m hpc_det.launch.job '/home/a b/experiments/12' 1 -- \
  /opt/venv/bin/python -m hpc_det.launch.on_nodes pbs_tmrsh '/home/a b/experiments/12/jobs' \
  /opt/venv/bin/python -m hpc_det.launch.agent
