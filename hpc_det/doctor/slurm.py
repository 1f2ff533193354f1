"""Checks of Slurm, after slurm.conf(5), sbatch(1) and srun(1)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial

from hpc_det.config.cluster import Cluster
from hpc_det.config.cluster_choice import Which
from hpc_det.config.fields import time_limit_min
from hpc_det.doctor import Finding
from hpc_det.errors import count
from hpc_det.schedulers.scheduler import CommandError, Run
from hpc_det.schedulers.site import Site
from hpc_det.schedulers.slurm.detect import CONFIG, PARTITIONS, SINFO, SRUN_HELP, parse_config
from hpc_det.schedulers.slurm.scheduler import gpu_flags

SUBJECT = "Slurm"
MPI_KINDS = ("srun", "--mpi=list")
COMMANDS = (CONFIG, SINFO, PARTITIONS, SRUN_HELP, MPI_KINDS)
_NEEDED = ("sbatch", "squeue", "scontrol", "scancel", "srun")
# These find the processes of a job by parent or process group, so they miss daemons (slurm.conf(5), ProctrackType).
_WITHOUT_CGROUPS = ("proctrack/linuxproc", "proctrack/pgid")
CRED_EXPIRE_S = 120
"""Default of cred_expire in seconds: slurm.conf(5), AuthInfo."""

_finding = partial(Finding, SUBJECT)
_ok = partial(_finding, "ok")
_note = partial(_finding, "note")
_problem = partial(_finding, "problem")


def findings(site: Site, ask: Run, which: Which) -> Iterator[Finding]:
    """Yield the findings for Slurm. Raises CommandError if a command fails."""
    config = parse_config(ask(CONFIG))
    yield _ok(f"{site.version}, cluster {site.name}, partitions {', '.join(pool.name for pool in site.pools)}")
    yield from _commands(which)
    yield from _requeue(config)
    yield from _preemption(site, config)
    yield _array(site)
    yield _accounting(config)
    yield from _steps(site, config)
    yield _pyxis(site, ask)
    yield _mpi(ask)


def requeue_delay_s(config: Mapping[str, str]) -> int:
    """Return the seconds for which Slurm holds a requeued job back."""
    # slurmctld waits until the job's credential has expired, and one second more (batch_requeue_fini in job_mgr.c)
    said = re.search(r"cred_expire=(\d+)", config.get("AuthInfo", ""))
    return (int(said[1]) if said else CRED_EXPIRE_S) + 1


def try_submission(cluster: Cluster, pool: str | None) -> tuple[str, ...]:
    """Return a command that checks whether Slurm would accept a job with all slots of one node; it submits nothing."""
    there = cluster.in_pool(pool)
    flags = {
        "nodes": 1,
        "ntasks": 1,
        "cpus-per-task": there.slots_per_node * there.cpus_per_slot,
        "mem": there.mem_per_node,
        "partition": pool,
        "account": there.account,
        "qos": there.qos,
        "time": there.time_limit and time_limit_min(there.time_limit),
    }
    given = [f"--{name}={value}" for name, value in flags.items() if value is not None]
    return ("sbatch", "--test-only", *given, *gpu_flags(there, there.slots_per_node), "--wrap=true")


def _commands(which: Which) -> Iterator[Finding]:
    if missing := [name for name in _NEEDED if not which(name)]:
        yield _problem(f"not on PATH: {', '.join(missing)}", "add the folder with the commands of Slurm to PATH")
    if which("qsub") and not which("pbsnodes"):
        yield _note("qsub is Slurm's emulation of Torque", "nothing to do: hpc_det calls sbatch")


def _requeue(config: Mapping[str, str]) -> Iterator[Finding]:
    if config.get("JobRequeue") == "0":
        yield _ok("jobs are not requeued by default (JobRequeue=0); scripts of hpc_det request it if they need it")
    delay_s = requeue_delay_s(config)
    yield _ok(f"requeued jobs wait {delay_s} s (cred_expire), or until hpc-det releases them; successors do not wait")
    if limit := config.get("MaxBatchRequeue"):
        yield _ok(
            f"a job that Slurm has requeued {count(int(limit), 'time')} is held (MaxBatchRequeue); a successor starts "
            "at 0"
        )


def _preemption(site: Site, config: Mapping[str, str]) -> Iterator[Finding]:
    preempted = [pool for pool in site.pools if pool.preempt_mode not in ("off", None)]
    kind = config.get("PreemptType", "unknown")
    if not preempted:
        yield _ok(f"jobs are never preempted ({kind})")
        return
    for pool in preempted:
        message = (
            f"partition {pool.name} preempts by {pool.preempt_mode}, GraceTime {pool.grace_time_s or 0} s ({kind})"
        )
        if pool.preempt_mode == "suspend":
            yield _note(
                f"{message}: jobs keep their GPUs' memory and cannot save", "ask the site for requeue or cancel"
            )
        elif not pool.grace_time_s:
            yield _note(
                f"{message}: a preempted job may end before it has saved",
                "set grace_time_s: 0 for the profile's pool, which enables checkpoint_interval: auto",
            )
        else:
            yield _ok(message)
    by_signal = "send_user_signal" in config.get("PreemptParameters", "")
    yield _ok(f"preempted jobs receive {'their own signal (send_user_signal)' if by_signal else 'TERM'}")
    if wait := config.get("KillWait"):
        yield _ok(f"{wait} between TERM and KILL (KillWait)")


def _array(site: Site) -> Finding:
    size = site.max_array_size
    if size == 1:
        return _note("no job arrays (MaxArraySize)", "set max_array_size: 1 in the profile")
    return _ok(f"arrays of up to {count(size, 'job')}" if size else "MaxArraySize is not set")


def _accounting(config: Mapping[str, str]) -> Finding:
    kept = config.get("AccountingStorageType", "").removeprefix("accounting_storage/")
    without = kept in ("", "none", "(null)")
    return _ok(f"{'no accounting' if without else f'accounting by {kept}'}; hpc_det does not need it")


def _steps(site: Site, config: Mapping[str, str]) -> Iterator[Finding]:
    kind = config.get("ProctrackType")
    if kind in _WITHOUT_CGROUPS:
        yield _note(
            f"{kind}: a process that has left its session may outlive its job", "ask the site for proctrack/cgroup"
        )
    elif kind:
        yield _ok(f"{kind}: all processes of a job end with it")
    yield _ok(f"GPUs are requested with --{site.gpu_flag} ({config.get('SelectType', 'select plugin unknown')})")


def _pyxis(site: Site, ask: Run) -> Finding:
    try:
        ask(SRUN_HELP)
    except CommandError as error:
        return _note(f"checking whether srun has pyxis failed: {error}", "try `srun --help`, or set another runtime")
    return _ok("srun can start containers (pyxis)" if site.runtime == "pyxis" else "srun has no pyxis")


def _mpi(ask: Run) -> Finding:
    try:
        kinds = [word for word in ask(MPI_KINDS).split() if re.fullmatch(r"pmi\w*", word)]
    except CommandError as error:
        return _note(f"checking the MPI plugins of srun failed: {error}", "keep mpi_launcher: [mpirun]")
    if not kinds:
        return _note("srun cannot start MPI ranks (--mpi=list)", "keep mpi_launcher: [mpirun]")
    return _ok(f"srun can start MPI ranks with {', '.join(kinds)}")
