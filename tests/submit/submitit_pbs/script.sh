#!/bin/bash
# train
# Written by hpc_det for submitit.
#PBS -N train
#PBS -l select=2:ncpus=2:mpiprocs=2:ompthreads=1
#PBS -l place=scatter
#PBS -l walltime=00:05:00
#PBS -r y
#PBS -j oe
#PBS -k oed
#PBS -q low
#PBS -W umask=022

# For submitit, job 12[3].server is 12_3. A job that continues another one has the id of the first.
own_id=${PBS_JOBID%%.*}
own_id=${own_id/\[/_}
export SUBMITIT_PBS_JOB_ID=${SUBMITIT_PBS_JOB_ID:-${own_id%]}}
job_id=$SUBMITIT_PBS_JOB_ID

. 'TMP/jobs of it'"'"'s/.submission_environment_UID.sh'
mkdir -p 'TMP/jobs of it'"'"'s'
exec >>'TMP/jobs of it'"'"'s/'"$job_id"_0_log.out 2>>'TMP/jobs of it'"'"'s/'"$job_id"_0_log.err
cd TMP || exit
module load cuda

export SUBMITIT_EXECUTOR=pbs
exec PYTHON -m hpc_det.submit.submitit_pbs.in_job 'TMP/jobs of it'"'"'s' 'apptainer exec image.sif python -u -m submitit.core._submit '"'"'TMP/jobs of it'"'"'"'"'"'"'"'"'s'"'"'' --output 'TMP/jobs of it'"'"'s/.submission_output_UID.log' --nodes 2 --tasks-per-node 2 --walltime-s 300 --warning-s 90 --used-s "$SECONDS"
