# Shared by slurm-up and slurm-down: the folder and the names of the lab, and its processes.
lab=$(realpath -m "${HPC_DET_LAB:-/var/tmp/hpc-det-lab}")
bridge=hpcdet0 netns=hpcdet-node # a lab of one machine has one bridge and these network namespaces: netns1, netns2...
# Use only Debian's Slurm, and no variables of another one: this machine may have its own Slurm.
for name in $(compgen -e); do
  case $name in HPC_DET_LAB* | HOME | TERM | *_proxy | *_PROXY) ;; *) unset "$name" ;; esac
done
unset name
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
export SLURM_CONF=$lab/etc/slurm.conf

die() {
  echo "${0##*/}: $*" >&2
  exit 2
}

# slurm-up and slurm-down exclude each other. -o: the daemons must not inherit the lock.
one_at_a_time() {
  [[ ${HPC_DET_LAB_LOCKED:-} ]] || HPC_DET_LAB_LOCKED=1 exec flock -o "$lab/lock" "$0" "$@"
}

# lab_pid PIDFILE: prints the PID if that process still is the daemon after which the file is named.
# Debian may add a suffix to the program: slurmd is slurmd-wlm.
lab_pid() {
  local pid name=${1##*/}
  [[ -s $1 ]] && pid=$(<"$1") && [[ $(readlink "/proc/$pid/exe") == */"${name%%.*}"* ]] && echo "$pid"
}
