"""hpc-det job, command by command."""

from __future__ import annotations

import click

from hpc_det.cli.groups import Group
from hpc_det.cli.output import Output, output_options, show
from hpc_det.cli.several import at_once, each


@click.group(cls=Group)
def job() -> None:
    """Look at the queue, and change places in it."""


def job_ids(text: str) -> list[str]:
    """Ids with commas between, each once."""
    if not all(named := text.split(",")):
        raise click.BadParameter(f"{text!r} names no job; expected ids such as 4711,4712")
    return list(dict.fromkeys(named))


jobs_argument = click.argument("jobs", metavar="JOB[,JOB...]", type=job_ids)


@job.command("list")
@click.option("-p", "--resource-pool", "pool", metavar="POOL", help="Of this pool, instead of the default one.")
@click.option("--all-pools", is_flag=True, help="Of all pools.")
@output_options
def list_(pool: str | None, all_pools: bool, output: Output) -> None:
    """Show the queue of a pool, in scheduling order. `ls` is the same.

    Jobs that run come first: they are SCHEDULED, or SUSPENDED while the scheduler has stopped them on their nodes. The
    others are QUEUED, or HELD where somebody has to let a job go. A priority is Determined's: 42 where nobody asked for
    another, lower is earlier.

    \b
    Example:
      hpc-det job list --resource-pool low --json
      [{"position": 0, "id": "4711", "type": "EXPERIMENT", "experiment": 12,
        "name": "digits", "priority": 42, "scheduler_priority": 4294901757,
        "submitted": "2026-11-20T10:02:05+01:00",
        "slots": {"acquired": 0, "needed": 8}, "state": "QUEUED",
        "user": "ada", "pool": "low", "reason": "Resources",
        "start": "2026-11-20T12:00:00+01:00"}]
    `type` is JOB, and `experiment` null, for all but your experiments. An array's
    jobs that wait together are one. `start` is the expected one of a job that
    waits, null where the scheduler expects none.
    """
    from hpc_det.cli.job.listing import KEYS, columns, listed

    if pool and all_pools:
        raise click.UsageError("--all-pools: --resource-pool was given, too; give one of them")
    output.table(listed(pool, all_pools=all_pools), columns(all_pools=all_pools), KEYS)


@job.command("update")
@jobs_argument
@click.option("--priority", metavar="N", help="From 1 to 99, lower is earlier; 42 where nobody asked for another.")
@click.option("--weight", metavar="W", help="Determined's share of a pool.")
@click.option("--resource-pool", metavar="POOL", help="Another partition or queue; for experiments alone.")
@click.option("--ahead-of", metavar="JOB", help="Ahead of this job of yours.")
@click.option("--behind-of", metavar="JOB", help="Behind this job.")
def update_(jobs: list[str], **given: str | None) -> None:
    """Change the places of jobs that wait. Give one of the options.

    Where the scheduler refuses, nothing is changed, and a sentence says who may. JOB is the scheduler's id, as
    `hpc-det job list` shows it; an array's id is all of its jobs that wait.

    \b
    Example:
      hpc-det job update 4711 --priority 60
      hpc-det job update 4712 --ahead-of 4711
      hpc-det job update 4711,4712 --resource-pool high
    """
    from hpc_det.cli.job.operations import operation
    from hpc_det.cli.job.updates import update

    said = {what.replace("_", "-"): value for what, value in given.items() if value is not None}
    if len(said) != 1:
        many = f"{' and '.join(f'--{what}' for what in said)} exclude each other" if said else "none was given"
        raise click.UsageError(f"{many}; give one of --priority, --weight, --resource-pool, --ahead-of and --behind-of")
    ((name, value),) = said.items()
    show("\n".join(update(at_once(jobs, lambda job_id: operation(job_id, name, value)))))


@job.command("update-batch")
@click.argument("updates", metavar="JOB.OPERATION=VALUE...", nargs=-1, required=True)
def update_batch(updates: tuple[str, ...]) -> None:
    """Change several jobs, one after the other: all or nothing.

    OPERATION is priority, weight, resource-pool, ahead-of or behind-of, as the options of `update`.

    \b
    Example:
      hpc-det job update-batch 4711.priority=60 4712.ahead-of=4711
    """
    from hpc_det.cli.job.operations import parsed
    from hpc_det.cli.job.updates import update

    show("\n".join(update(at_once(updates, parsed))))


@job.command()
@jobs_argument
def hold(jobs: list[str]) -> None:
    """Keep jobs from starting, until `release`.

    \b
    Example:
      hpc-det job hold 4711
    """
    from hpc_det.cli.job import holds

    each(jobs, holds.hold)


@job.command()
@jobs_argument
def release(jobs: list[str]) -> None:
    """Let jobs start that are held.

    Slurm also holds a job for two minutes that went back into the queue.

    \b
    Example:
      hpc-det job release 4711
    """
    from hpc_det.cli.job import holds

    each(jobs, holds.release)
