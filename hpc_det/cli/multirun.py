"""What `run --multirun` does with its points."""

from __future__ import annotations

import json
from collections.abc import Sequence

import click

from hpc_det.cli.create import say_notes, show_and_submit
from hpc_det.cli.parameters import Choices
from hpc_det.config.merge import Tree
from hpc_det.config.request import for_test
from hpc_det.errors import UsageError, printable
from hpc_det.plan.multirun import Multirun, effective_multirun


def submit_or_show_multirun(multirun: Multirun, choices: Choices) -> None:
    """One experiment with a trial for each point."""
    if choices.local:
        raise UsageError("--local: trains one trial in this process, and a sweep has many; leave out --multirun")
    found = effective_multirun(multirun.with_requests(for_test) if choices.test else multirun)
    say_notes(found)
    if not choices.test:  # which makes points equal that are not
        _say_points(multirun, found.points)
    show_and_submit(found, choices)
    if choices.dry_run or choices.explain:
        for number, point in enumerate(multirun.points, 1):
            click.echo(f"# trial {number}: {printable(' '.join(point.overrides))}")


def _say_points(multirun: Multirun, points: Sequence[Tree]) -> None:
    """What of a sweep may not be meant."""
    if len(points) == 1:
        click.echo("hpc-det: note: -m: no override has several values, such as KEY=A,B; there is one trial", err=True)
    first: dict[str, int] = {}
    for number, point in enumerate(points, 1):
        same = first.setdefault(json.dumps(point, sort_keys=True), number)
        if same != number:
            overrides = printable(" ".join(multirun.points[number - 1].overrides))
            click.echo(f"hpc-det: note: -m: trials {same} and {number} are the same: {overrides}", err=True)
