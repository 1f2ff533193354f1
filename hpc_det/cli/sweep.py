"""What `run --multirun` does with a sweep."""

from __future__ import annotations

import click

from hpc_det.cli.create import explained
from hpc_det.cli.parameters import Choices, store
from hpc_det.config.problems import printable
from hpc_det.config.request import for_test
from hpc_det.config.sweep import Sweep, SweepEffective, effective_sweep
from hpc_det.errors import UsageError
from hpc_det.store.folders import ExperimentStore
from hpc_det.submit.submission import prepare


def submit_or_show_sweep(sweep: Sweep, choices: Choices) -> None:
    """A dry run prints the script of the first point, and below it as comments how many there are."""
    if choices.local:
        raise UsageError("--local: trains one trial in this process, and a sweep has many; leave out --multirun")
    found = effective_sweep(sweep.with_requests(for_test) if choices.test else sweep)
    experiments = store()
    if choices.dry_run:
        script = prepare(found.common, experiments.folder(experiments.next_id())).script
        click.echo(script.encode(), nl=False)
        click.echo(f"# {_number(sweep)}; this is the script of the first")
    if choices.explain:
        _explain(sweep, found)
    if not choices.dry_run:
        submit_sweep(sweep, found, experiments, follow=choices.follow)


def submit_sweep(sweep: Sweep, found: SweepEffective, experiments: ExperimentStore, *, follow: bool) -> None:
    """One experiment with a trial for each point."""
    raise UsageError("--multirun: not in this version; add --dry-run to see what it would be")


def _number(sweep: Sweep) -> str:
    return f"{len(sweep.points)} points" if len(sweep.points) > 1 else "1 point"


def _explain(sweep: Sweep, found: SweepEffective) -> None:
    for number, point in enumerate(sweep.points, 1):
        click.echo(f"# point {number}: {printable(' '.join(point.overrides))}")
    for line in explained(found.common):
        click.echo(f"# {line}")
