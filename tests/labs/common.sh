# What slurm-up and slurm-down share: where the lab lies, what it is called, and how to tell its processes.
lab=$(realpath -m "${HPC_DET_LAB:-/var/tmp/hpc-det-lab}")
bridge=hpcdet0 netns=hpcdet-node # a lab of one machine has one bridge and these network namespaces: netns1, netns2...
# Only Debian's Slurm, and no variable that another one has set: this machine may have a Slurm of its own.
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

# Up and down take turns. -o: the daemons must not inherit the lock.
one_at_a_time() {
  [[ ${HPC_DET_LAB_LOCKED:-} ]] || HPC_DET_LAB_LOCKED=1 exec flock -o "$lab/lock" "$0" "$@"
}

# lab_pid PIDFILE: prints the pid if that process still is the daemon that the file is named after.
# Debian may add a suffix to the program: slurmd is slurmd-wlm.
lab_pid() {
  local pid name=${1##*/}
  [[ -s $1 ]] && pid=$(<"$1") && [[ $(readlink "/proc/$pid/exe") == */"${name%%.*}"* ]] && echo "$pid"
}
