#!/bin/bash
# experiment 12: digits
# Written by hpc_det. To start the same job by hand, run `bash` with this file.
exec >>'/home/a b/experiments/12/jobs/1.log' 2>&1
cd '/home/a b/experiments/12' || exit

module load cuda/12.4 || exit
ulimit -n 4096
export PATH=/opt/venv/bin:"$PATH"

# the job process starts one agent
exec /opt/venv/bin/python -m hpc_det.launch.job '/home/a b/experiments/12' 1 -- \
  /opt/venv/bin/python -m hpc_det.launch.agent
