#!/bin/bash
# experiment 12, trial 1: digits
# Written by hpc_det. `bash job.sh` by hand does the same job.
exec >>'/home/a b/trials/1/logs/job.log' 2>&1
cd '/home/a b/trials/1' || exit

module load cuda/12.4 || exit
ulimit -n 4096
export PATH=/opt/venv/bin:"$PATH"

# one node agent, for each attempt
exec /opt/venv/bin/python -m hpc_det.launch.job '/home/a b/trials/1' -- \
  /opt/venv/bin/python -m hpc_det.launch.agent '/home/a b/trials/1'
