"""hpc-det experiment create, and what `run` shares with it."""

from __future__ import annotations

import gc
import getpass
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from hpc_det import compat
from hpc_det.cli.arguments import Choices, choices_options, request_options, store
from hpc_det.cli.experiment.cleanup import cleanup_daily
from hpc_det.cli.experiment.config import explained
from hpc_det.config.entrypoint import trial_name
from hpc_det.config.merge import Tree
from hpc_det.config.rank_variables import asks_for_compat
from hpc_det.config.request import Request, for_test, on_one_slot
from hpc_det.config.secrets import masked
from hpc_det.errors import UsageError, printable
from hpc_det.plan.effective import Effective, effective
from hpc_det.plan.multirun import Multirun, effective_multirun
from hpc_det.search.sample import first_sample
from hpc_det.store.experiments import ExperimentStore, state_root
from hpc_det.store.folders import ExperimentFolder
from hpc_det.store.group import Group
from hpc_det.submit.submission import prepare, source_checkpoint, submit
from hpc_det.view.watch import say


@click.command()
@request_options
@choices_options
def create(request: Request, choices: Choices) -> None:
    """Create an experiment from a YAML file and the folder of its code.

    CONTEXT_DIR is copied for the job, without what its .detignore names; by default the `context_dir` of CONFIG, or
    the current directory. What --include names lies beside it there, under its own name.

    Without --follow the last line is `Created experiment N`. A dry run's output is the script; --explain adds comment
    lines. --local trains in this process, on the folder itself: with --test it shows in seconds whether everything fits
    together, with --pdb it stops in the debugger where it does not.

    \b
    Example:
      hpc-det experiment create digits.yaml . --cluster slurm --template small \\
          --config resources.slots_per_trial=8
    """
    submit_or_show(request, choices)


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
        say(f"note: {note}")


def _submit(found: Effective, experiments: ExperimentStore, choices: Choices) -> None:
    paused_by = getpass.getuser() if choices.paused else None
    folder = submit(found, experiments, group=choices.shared, paused_by=paused_by)
    if choices.shared:
        say_shared(folder, choices.shared)
    click.echo(f"Created experiment {folder.id}")
    cleanup_daily(experiments)
    if choices.follow:
        show_training(folder)


def say_shared(experiment: ExperimentFolder, group: Group) -> None:
    """On stderr: with whom, how they name it, and what is in their way."""
    say(f"shared with group {group.name!r}, as {experiment.root()}:{experiment.id}")
    places = filter(None, (experiment.path, experiment.checkpoints_elsewhere()))
    for problem in dict.fromkeys(problem for place in places for problem in group.obstacles(place)):
        say(f"note: {problem}")


def show_training(experiment: ExperimentFolder) -> None:
    """The training until its end."""
    from hpc_det.cli.experiment.follow import follow  # loads rich

    follow(experiment)


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
        say("note: -m: no override has several values, such as KEY=A,B; there is one trial")
    first: dict[str, int] = {}
    for number, point in enumerate(points, 1):
        same = first.setdefault(json.dumps(point, sort_keys=True), number)
        if same != number:
            overrides = printable(" ".join(multirun.points[number - 1].overrides))
            say(f"note: -m: trials {same} and {number} are the same: {overrides}")


def run_here(found: Effective, *, test: bool, debug: bool) -> None:
    """Raises UsageError for an entrypoint that names no trial."""
    name = trial_name(found.tree["entrypoint"])
    if name is None:
        raise UsageError(
            f"--local: the entrypoint {found.tree['entrypoint']!r} names no trial to run in this process; use one with "
            f"`--trial module:Class`, or start the script by itself"
        )
    _set_environment(found)
    gc.disable()  # what an import makes stays, see hpc_det.launch.rank
    from hpc_det.pytorch.loop.harness import run_locally

    gc.freeze()
    gc.enable()
    outcome = run_locally(name, _spec(found), found.context_dir, test=test, debug=debug)
    if test and outcome["kind"] == "finished":
        click.echo("One batch was trained, validated and saved.")
    else:
        click.echo(f"{outcome['kind'].capitalize()} at batch {outcome['steps']}.")


def _set_environment(found: Effective) -> None:
    """As the ranks of a job have it."""
    variables = found.experiment.environment.variables(found.cluster.slot_type)
    values = {name: value for name, _, value in (variable.partition("=") for variable in variables)}
    os.environ.update(values)
    # Python has read its own before, at its start.
    folders = filter(None, values.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:0] = [str(found.context_dir / folder) for folder in folders]
    if found.cluster.slot_type == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if asks_for_compat(os.environ):
        compat.install()


def _spec(found: Effective) -> dict[str, Any]:
    """Of the first trial that the experiment would have."""
    sample = first_sample(found.tree["hyperparameters"], found.tree["reproducibility"]["experiment_seed"] or 0)
    spec = {
        "experiment_id": 0,
        "trial_id": 0,
        "trial_seed": sample.seed,
        "hparams": sample.hparams,
        "config": found.tree,
    }
    source = source_checkpoint(found.tree["searcher"], ExperimentStore(state_root(os.environ)))
    return {**spec, "warm_start": str(source)} if source else spec
