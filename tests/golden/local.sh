#!/bin/bash
# experiment 12: digits
# Written by hpc_det. To start the same job by hand, run `bash` with this file.
exec >>/home/ada/hpc_det/experiments/12/jobs/1.log 2>&1
cd /home/ada/hpc_det/experiments/12 || exit

export PATH=/opt/venv/bin:"$PATH"

# the job process starts one agent
exec /opt/venv/bin/python -m hpc_det.launch.job /home/ada/hpc_det/experiments/12 1 -- \
  /opt/venv/bin/python -m hpc_det.launch.agent
