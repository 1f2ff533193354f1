"""Slurm, after slurm.conf(5), sbatch(1) and srun(1)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial

from hpc_det.config.cluster import Cluster
from hpc_det.config.fields import time_limit_min
from hpc_det.doctor import Finding
from hpc_det.schedulers.scheduler import CommandError, Run
from hpc_det.schedulers.site import Site, Which
from hpc_det.schedulers.slurm.detect import CONFIG, PARTITIONS, SINFO, SRUN_HELP, parse_config
from hpc_det.schedulers.slurm.scheduler import gpu_flags

SUBJECT = "Slurm"
MPI_KINDS = ("srun", "--mpi=list")
COMMANDS = (CONFIG, SINFO, PARTITIONS, SRUN_HELP, MPI_KINDS)
_NEEDED = ("sbatch", "squeue", "scontrol", "scancel", "srun")
_WITHOUT_CGROUPS = ("proctrack/linuxproc", "proctrack/pgid")
CRED_EXPIRE_S = 120
"""slurm.conf(5), AuthInfo: where it does not say."""

_finding = partial(Finding, SUBJECT)
_ok = partial(_finding, "ok")
_note = partial(_finding, "note")
_problem = partial(_finding, "problem")


def findings(site: Site, ask: Run, which: Which) -> Iterator[Finding]:
    """Raises CommandError where Slurm stops answering."""
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
    """How long a requeued job is held back: until its credential has surely expired (slurmctld)."""
    said = re.search(r"cred_expire=(\d+)", config.get("AuthInfo", ""))
    return (int(said[1]) if said else CRED_EXPIRE_S) + 1


def try_submission(cluster: Cluster, pool: str | None) -> tuple[str, ...]:
    """The command that asks Slurm whether it would take a job of one node, with all its slots, and submits none."""
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
        yield _problem(f"not on PATH: {', '.join(missing)}", "add the folder of Slurm's commands to PATH")
    if which("qsub") and not which("pbsnodes"):
        yield _note("qsub here is Slurm's imitation of Torque's", "leave it: hpc_det calls sbatch")


def _requeue(config: Mapping[str, str]) -> Iterator[Finding]:
    if config.get("JobRequeue") == "0":
        yield _ok("jobs are not requeued by default (JobRequeue=0); scripts of hpc_det ask for it where they need it")
    delay_s = requeue_delay_s(config)
    yield _ok(f"requeued jobs wait {delay_s} s (cred_expire), or until hpc-det releases them; successors do not wait")
    if limit := config.get("MaxBatchRequeue"):
        yield _ok(f"a job that Slurm has requeued {limit} times is held (MaxBatchRequeue); successors count anew")


def _preemption(site: Site, config: Mapping[str, str]) -> Iterator[Finding]:
    preempted = [pool for pool in site.pools if pool.preempt_mode not in ("off", None)]
    kind = config.get("PreemptType", "unknown")
    if not preempted:
        yield _ok(f"nobody is preempted ({kind})")
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
                "have grace_time_s: 0 in the profile's pool; checkpoint_interval: auto is then on by itself",
            )
        else:
            yield _ok(message)
    by_signal = "send_user_signal" in config.get("PreemptParameters", "")
    yield _ok(f"preempted jobs are told by {'their own signal (send_user_signal)' if by_signal else 'TERM'}")
    if wait := config.get("KillWait"):
        yield _ok(f"{wait} lie between TERM and KILL (KillWait)")


def _array(site: Site) -> Finding:
    size = site.max_array_size
    if size == 1:
        return _note("no job arrays (MaxArraySize)", "have max_array_size: 1 in the profile")
    return _ok(f"arrays of up to {size} jobs" if size else "MaxArraySize is not set")


def _accounting(config: Mapping[str, str]) -> Finding:
    kept = config.get("AccountingStorageType", "").removeprefix("accounting_storage/")
    without = kept in ("", "none", "(null)")
    return _ok(f"{'no accounting' if without else f'accounting by {kept}'}; hpc_det needs none")


def _steps(site: Site, config: Mapping[str, str]) -> Iterator[Finding]:
    kind = config.get("ProctrackType")
    if kind in _WITHOUT_CGROUPS:
        yield _note(f"{kind}: a process that left its session may outlive its job", "ask for proctrack/cgroup")
    elif kind:
        yield _ok(f"{kind}: no process outlives its job")
    yield _ok(f"GPUs are asked for by --{site.gpu_flag} ({config.get('SelectType', 'select plugin unknown')})")


def _pyxis(site: Site, ask: Run) -> Finding:
    try:
        ask(SRUN_HELP)
    except CommandError as error:
        return _note(f"whether srun has pyxis: {error}", "try `srun --help`, or name another runtime")
    return _ok("srun starts containers by itself (pyxis)" if site.runtime == "pyxis" else "srun has no pyxis")


def _mpi(ask: Run) -> Finding:
    try:
        kinds = [word for word in ask(MPI_KINDS).split() if re.fullmatch(r"pmi\w*", word)]
    except CommandError as error:
        return _note(f"kinds of MPI: {error}", "keep mpi_launcher: [mpirun]")
    if not kinds:
        return _note("srun starts no MPI ranks (--mpi=list)", "keep mpi_launcher: [mpirun]")
    return _ok(f"srun starts MPI ranks by {', '.join(kinds)}")
