"""hpc-det job list, and the functions with which all `job` commands access the queue of this machine's scheduler."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from operator import itemgetter
from pathlib import Path
from typing import Any

import click

from hpc_det.cli.output import Column, Output, Record, column, output_options
from hpc_det.client.lookup import store
from hpc_det.config.cluster_choice import schedulers_here
from hpc_det.errors import UsageError
from hpc_det.plan.job_plan import JobPlan
from hpc_det.schedulers import local
from hpc_det.schedulers.queue import Queue, QueuedJob, queue, this_user
from hpc_det.schedulers.scheduler import CommandError, JobState, run_command
from hpc_det.store.folders import ExperimentFolder
from hpc_det.view.formatting import NONE, date_and_time, iso


@click.command("list")
@click.option("-p", "--resource-pool", "pool", metavar="POOL", help="Show this pool instead of the default one.")
@click.option("--all-pools", is_flag=True, help="Show all pools.")
@output_options
def list_(pool: str | None, all_pools: bool, output: Output) -> None:
    """Show the queue of a pool, in scheduling order. `ls` is an alias.

    Running jobs come first: they are SCHEDULED, or SUSPENDED while the scheduler has stopped their processes. The
    others are QUEUED, or HELD until they are released. Priorities are Determined's: the default is 42, and lower starts
    earlier. The scheduler's own priority is higher for jobs that start earlier: on Slurm that of squeue, on PBS the
    job's Priority, which a formula of the site may override.

    \b
    Example:
      hpc-det job list --resource-pool low --json
      [{"position": 0, "id": "4711", "type": "EXPERIMENT", "experiment": 12,
        "name": "digits", "priority": 42, "scheduler_priority": 4294901757,
        "submitted": "2026-11-20T10:02:05+01:00",
        "slots": {"acquired": 0, "needed": 8}, "state": "QUEUED",
        "user": "ada", "pool": "low", "reason": "Resources",
        "waits_for": [], "start": "2026-11-20T12:00:00+01:00"}]
    `type` is JOB and `experiment` is null for every job that does not belong to one
    of your experiments. The waiting jobs of an array are one record. `waits_for` has the
    jobs whose end a successor waits for. `scheduler_priority` is null if the scheduler
    reports none. `start` is the expected start of a waiting job, null if the scheduler has
    no estimate.
    """
    if pool and all_pools:
        raise click.UsageError("--all-pools: conflicts with --resource-pool; give one of them")
    records = listed(pool, all_pools=all_pools)
    output.table(records, columns(all_pools=all_pools), KEYS)
    if output.is_for_people and any(record["waits_for"] for record in records):
        click.echo(f"\n{LEGEND}")


# Determined's state names, except HELD and SUSPENDED: Determined does not hold or suspend jobs.
STATES = {JobState.QUEUED: "QUEUED", JobState.HELD: "HELD", JobState.RUNNING: "SCHEDULED"}
SUSPENDED = "SUSPENDED"


def listed(pool: str | None, *, all_pools: bool) -> list[dict[str, Any]]:
    """Return one record for each job, as `list --json` prints it."""
    jobs = _jobs(queue_here(), pool, all_pools=all_pools)
    return [_record(position, job) for position, job in enumerate(jobs)]


def _jobs(queue: Queue | None, pool: str | None, *, all_pools: bool) -> Sequence[QueuedJob]:
    """Return the jobs of a pool, of the default pool (None) or of all pools, in scheduling order."""
    if queue is None or pool == local.POOL:  # jobs that run on this machine without a scheduler are a separate pool
        if pool not in (None, local.POOL):
            raise UsageError(f"--resource-pool: no pool {pool!r}; this machine has no scheduler; {_known([])}")
        return local.jobs()
    if all_pools:
        return [*queue.jobs(run_command), *local.jobs()]
    return queue.jobs(run_command, pool=_checked(pool, queue.pools(run_command)))


def _checked(pool: str | None, pools: dict[str, bool]) -> str:
    """Return the name of the pool, or of the default pool for None. Raises UsageError if it does not exist."""
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
    # the scheduler reports GPUs and CPUs, but not how many CPUs are one slot; the plan of an experiment does
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
        "waits_for": list(job.waits_for),
        "start": job.starts and iso(job.starts),
    }


def experiment_of(job: QueuedJob) -> ExperimentFolder | None:
    """Return the user's experiment that the job belongs to, or None."""
    # `path` is the working folder or the log of a job, which for jobs of an experiment is in its folder
    experiments = store().root / "experiments"
    if job.user == this_user():
        with suppress(ValueError, IndexError):
            return store().folder(int(Path(job.path).relative_to(experiments).parts[0]))
    return None


def _planned_slots(experiment: ExperimentFolder) -> int | None:
    """Return the slots of one job of the experiment, or None if the plan cannot be read."""
    with suppress(OSError, ValueError, LookupError, TypeError):  # the folder may have been deleted
        plan = JobPlan.of(experiment)
        return plan.job_nodes * plan.job_slots_per_node
    return None


# keys of a record in the JSON and CSV output
KEYS = (
    "position id type experiment name priority scheduler_priority submitted slots state user pool reason waits_for "
    "start"
)


def columns(*, all_pools: bool) -> list[Column]:
    """Return the columns of the table; the pool is one of them only if all pools are shown."""
    pools = [Column("Pool", itemgetter("pool"))] if all_pools else []
    return [*_COLUMNS, *pools]


def _type(record: Record) -> str:
    return f"EXPERIMENT {record['experiment']}" if record["experiment"] else str(record["type"])


def _when(moment: str | None) -> str:
    return date_and_time(datetime.fromisoformat(moment).timestamp()) if moment else NONE


def _reason(record: Record) -> str:
    return f"after {', '.join(record['waits_for'])}" if record["waits_for"] else record["reason"] or NONE


LEGEND = (
    "after JOB: starts when JOB has ended. Such a job of an experiment is a successor, submitted beforehand: it "
    "resumes the experiment, or exits at once if nothing is left to do."
)
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
    column("Scheduler Priority", "scheduler_priority"),
    Column("Reason", _reason),
    Column("Start", lambda record: _when(record["start"])),
)


def queue_here() -> Queue | None:
    """Return the queue of the scheduler on PATH; of two schedulers, the first that answers. None: no scheduler."""
    queues = [queue(name) for name in schedulers_here(shutil.which)]
    for found in queues[:-1]:
        with suppress(CommandError):
            found.pools(run_command)
            return found
    return queues[-1] if queues else None


def queue_to_change() -> Queue:
    """Return the queue of the scheduler on PATH; raise UsageError if there is none."""
    found = queue_here()
    if found is None:
        raise UsageError(
            "job: this machine has no scheduler, so jobs start at once and none waits; on a cluster, use a login node"
        )
    return found


def jobs_named(job_id: str, jobs: Sequence[QueuedJob]) -> list[QueuedJob]:
    """Return the jobs with this ID; the ID of an array selects all its jobs. Raises UsageError if there is none."""
    found = {job.named: job for job in jobs if job_id in _names(job)}  # a job that waits in two pools is listed twice
    if not found:
        raise UsageError(f"job {job_id}: not in the queue; `hpc-det job list --all-pools` shows what is")
    return list(found.values())


def own_jobs(job_id: str, jobs: Sequence[QueuedJob]) -> list[QueuedJob]:
    """Return the jobs with this ID; raise UsageError if one belongs to another user."""
    found = jobs_named(job_id, jobs)
    for job in found:
        if job.user != this_user():
            raise UsageError(
                f"job {job_id}: belongs to {job.user}; only {job.user} and the site's operators may change it"
            )
    return found


def own_waiting_jobs() -> list[QueuedJob]:
    """Return the user's waiting jobs of all pools in scheduling order, each once.

    Raises UsageError without a scheduler, CommandError if it does not answer.
    """
    jobs = [job for job in queue_to_change().jobs(run_command) if job.waits and job.user == this_user()]
    return list({job.named: job for job in jobs}.values())  # a job that waits in two pools is listed in both


def waiting(job_id: str, found: Sequence[QueuedJob]) -> list[QueuedJob]:
    """Return the jobs of `found` that wait in the queue; raise UsageError if none does, because all of them run."""
    if waits := [job for job in found if job.waits]:
        return waits
    raise UsageError(f"job {job_id}: is already running, so it no longer has a place in the queue")


def waits(job_id: str, jobs: Sequence[QueuedJob]) -> bool:
    """Return whether any job with this ID waits."""
    return any(job.waits for job in jobs if job_id in _names(job))


def _names(job: QueuedJob) -> set[str]:
    """Return the IDs by which a user may name the job."""
    without_server = job.job_id.partition(".")[0]  # PBS: 4711.server
    # an array's ID: 4711 for Slurm's 4711_3, and PBS's 4711[] may be written without the brackets
    return {job.job_id, without_server, without_server.partition("_")[0], without_server.removesuffix("[]")}
