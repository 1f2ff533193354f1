"""hpc-det job list."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from operator import itemgetter
from pathlib import Path
from typing import Any

from hpc_det.cli.ids import store
from hpc_det.cli.job.here import queue_here
from hpc_det.cli.output import Column, Record
from hpc_det.errors import UsageError
from hpc_det.plan.job_plan import JobPlan
from hpc_det.schedulers import local
from hpc_det.schedulers.queue import Queue, QueuedJob, this_user
from hpc_det.schedulers.scheduler import JobState, run_command
from hpc_det.store.folders import ExperimentFolder
from hpc_det.view.formatting import NONE, date_and_time, iso

STATES = {JobState.QUEUED: "QUEUED", JobState.HELD: "HELD", JobState.RUNNING: "SCHEDULED"}
"""Determined's words, and HELD and SUSPENDED: it has no holds, and suspends no jobs."""
SUSPENDED = "SUSPENDED"


def listed(pool: str | None, *, all_pools: bool) -> list[dict[str, Any]]:
    """One record for each job, as `list --json` prints it."""
    jobs = _jobs(queue_here(), pool, all_pools=all_pools)
    return [_record(position, job) for position, job in enumerate(jobs)]


def _jobs(queue: Queue | None, pool: str | None, *, all_pools: bool) -> Sequence[QueuedJob]:
    """What runs on this machine without its scheduler has a pool of its own."""
    if queue is None or pool == local.POOL:
        if pool not in (None, local.POOL):
            raise UsageError(f"--resource-pool: no pool {pool!r}; this machine has no scheduler, so {_known([])}")
        return local.jobs()
    if all_pools:
        return [*queue.jobs(run_command), *local.jobs()]
    return queue.jobs(run_command, pool=_checked(pool, queue.pools(run_command)))


def _checked(pool: str | None, pools: dict[str, bool]) -> str:
    """The default one where none was named. Raises UsageError."""
    default = next((name for name, is_default in pools.items() if is_default), None)
    if pool is None and default is None:
        raise UsageError(f"--resource-pool: the site has no default pool; name one; {_known(pools)}")
    if pool is not None and pool not in pools:
        raise UsageError(f"--resource-pool: no pool {pool!r}; {_known(pools)}")
    return pool or str(default)


def _known(pools: Sequence[str] | dict[str, bool]) -> str:
    return f"known: {', '.join([*sorted(pools), local.POOL])}"


def _record(position: int, job: QueuedJob) -> dict[str, Any]:
    experiment = experiment_of(job)
    slots = (experiment and _planned_slots(experiment)) or job.slots
    return {
        "position": position,
        "id": job.job_id,
        "type": "EXPERIMENT" if experiment else "JOB",
        "experiment": experiment and experiment.id,
        "name": job.name,
        "priority": int(job.priority) if job.priority == int(job.priority) else job.priority,
        "scheduler_priority": job.scheduler_priority,
        "submitted": job.submitted and iso(job.submitted),
        "slots": {"acquired": slots * job.running, "needed": slots * (job.running + job.waiting)},
        "state": SUSPENDED if job.is_suspended else STATES.get(job.state, "UNKNOWN"),
        "user": job.user,
        "pool": job.pool,
        "reason": job.reason,
        "start": job.starts and iso(job.starts),
    }


def experiment_of(job: QueuedJob) -> ExperimentFolder | None:
    """The user's experiment that the job is of: its working folder or its log lies in the experiment's folder."""
    experiments = store().root / "experiments"
    if job.user == this_user():
        with suppress(ValueError, IndexError):
            return store().folder(int(Path(job.path).relative_to(experiments).parts[0]))
    return None


def _planned_slots(experiment: ExperimentFolder) -> int | None:
    """Of one job. The scheduler knows GPUs and CPUs, but not how many CPUs are a slot."""
    with suppress(OSError, ValueError, LookupError, TypeError):  # of a folder that was deleted, say
        plan = JobPlan.of(experiment)
        return plan.job_nodes * plan.job_slots_per_node
    return None


KEYS = "position id type experiment name priority scheduler_priority submitted slots state user pool reason start"
"""Of a record."""


def columns(*, all_pools: bool) -> list[Column]:
    pools = [Column("Pool", itemgetter("pool"))] if all_pools else []
    return [*_COLUMNS, *pools]


def _type(record: Record) -> str:
    return f"EXPERIMENT {record['experiment']}" if record["experiment"] else str(record["type"])


def _when(moment: str | None) -> str:
    return date_and_time(datetime.fromisoformat(moment).timestamp()) if moment else NONE


_COLUMNS = (
    Column("#", lambda record: str(record["position"])),
    Column("ID", itemgetter("id")),
    Column("Type", _type),
    Column("Job Name", itemgetter("name")),
    Column("Priority", lambda record: f"{record['priority']:g}"),
    Column("Submitted", lambda record: _when(record["submitted"])),
    Column("Slots (acquired/needed)", lambda record: "{acquired}/{needed}".format(**record["slots"])),
    Column("Status", itemgetter("state")),
    Column("User", itemgetter("user")),
    Column("Reason", lambda record: record["reason"] or "-"),
    Column("Start", lambda record: _when(record["start"])),
)
