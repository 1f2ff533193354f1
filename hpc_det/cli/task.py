"""hpc-det task: list the running gangs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from hpc_det.cli.commands import Group
from hpc_det.cli.output import Output, column, output_options
from hpc_det.client.lookup import store
from hpc_det.errors import say
from hpc_det.view.experiments import look
from hpc_det.view.formatting import iso
from hpc_det.view.trial_history import read_attempts
from hpc_det.view.watch import readable_states


@click.group(cls=Group)
def task() -> None:
    """List the running gangs of all experiments."""


@task.command("list")
@output_options
def list_(output: Output) -> None:
    """List the running gangs: trial, attempt, slots, job, host and start time of each.

    \b
    Example:
      hpc-det task list --json
      [{"trial": "13/1", "name": "digits", "attempt": 2, "slots": 4,
        "job_id": "4713", "host": "node1",
        "started": "2026-11-20T10:02:05+01:00"}]
    """
    output.table(list(_running()), COLUMNS, KEYS)


def _running() -> Iterator[dict[str, Any]]:
    """Yield a record for each trial with an open attempt in a job that runs."""
    views = look(store()).under_way
    found, damaged = readable_states(views)
    for error in damaged.values():
        say(f"warning: {error}")
    for view in views:
        if view.id not in found or not found[view.id].has_job:
            continue
        plan = view.plan()
        for worker, work in sorted(view.search.open.items()):
            for attempt in read_attempts(view.folder.trial(work.trial))[-1:]:
                # an attempt whose job was killed stays open, so its job is compared with that of the worker now
                if attempt.is_open and view.search.present.get(worker) == attempt.job_id:
                    yield {
                        "trial": f"{view.id}/{work.trial}",
                        "name": view.about().name,
                        "attempt": attempt.number,
                        "slots": plan.world_size,
                        "job_id": attempt.job_id,
                        "host": attempt.host,
                        "started": iso(attempt.started),
                    }


KEYS = "trial name attempt slots job_id host started"  # of a record
COLUMNS = (
    column("TRIAL", "trial"),
    column("NAME", "name"),
    column("ATTEMPT", "attempt"),
    column("SLOTS", "slots"),
    column("JOB", "job_id"),
    column("HOST", "host"),
    column("SINCE", "started"),
)
