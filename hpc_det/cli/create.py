"""What `experiment create` and `run` do with a request."""

from __future__ import annotations

import getpass

import click

from hpc_det.cli.cleanup import cleanup_daily
from hpc_det.cli.ids import store
from hpc_det.cli.local import run_here
from hpc_det.cli.origins import explained
from hpc_det.cli.parameters import Choices
from hpc_det.config.request import Request, for_test, on_one_slot
from hpc_det.config.secrets import masked
from hpc_det.errors import UsageError
from hpc_det.plan.effective import Effective, effective
from hpc_det.store.experiments import ExperimentStore
from hpc_det.store.folders import ExperimentFolder
from hpc_det.store.group import Group
from hpc_det.submit.submission import prepare, submit


def submit_or_show(request: Request, choices: Choices) -> None:
    """Everything a dry run prints is what a submission would use. Comments follow a script, so it stays one."""
    if choices.test:
        request = for_test(request)
    if choices.local:
        if request.includes:
            raise UsageError("--local: trains on CONTEXT_DIR itself, where --include adds nothing; leave out one")
        request = on_one_slot(request)
    found = effective(request)
    say_notes(found)
    if choices.local:
        if choices.explain:
            show_explained(found)
        run_here(found, test=choices.test, debug=choices.pdb)
    else:
        show_and_submit(found, choices)


def show_and_submit(found: Effective, choices: Choices) -> None:
    experiments = store()
    if choices.dry_run:
        click.echo(prepare(found, experiments.folder(experiments.next_id())).jobs.scripts[1].encode(), nl=False)
    if choices.explain:
        show_explained(found)
    if not choices.dry_run:
        _submit(found, experiments, choices)


def show_explained(found: Effective) -> None:
    for line in explained(masked(found.tree), found.origins):
        click.echo(f"# {line}")


def say_notes(found: Effective) -> None:
    """On stderr, so that a dry run's output stays a script."""
    for note in found.notes:
        click.echo(f"hpc-det: note: {note}", err=True)


def _submit(found: Effective, experiments: ExperimentStore, choices: Choices) -> None:
    paused_by = getpass.getuser() if choices.paused else None
    folder = submit(found, experiments, group=choices.shared, paused_by=paused_by)
    if choices.shared:
        say_shared(folder, choices.shared)
    click.echo(f"Created experiment {folder.id}")
    cleanup_daily(experiments)
    if choices.follow:
        show(folder)


def say_shared(experiment: ExperimentFolder, group: Group) -> None:
    """On stderr: with whom, how they name it, and what is in their way."""
    click.echo(f"hpc-det: shared with group {group.name!r}, as {experiment.root()}:{experiment.id}", err=True)
    places = filter(None, (experiment.path, experiment.checkpoints_elsewhere()))
    for problem in dict.fromkeys(problem for place in places for problem in group.obstacles(place)):
        click.echo(f"hpc-det: note: {problem}", err=True)


def show(experiment: ExperimentFolder) -> None:
    """The training until its end."""
    from hpc_det.cli.follow import follow  # loads rich

    follow(experiment)
