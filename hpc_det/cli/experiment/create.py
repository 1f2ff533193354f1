"""hpc-det experiment create, and the functions that it shares with `run` and `experiment fork`."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from hpc_det import compat
from hpc_det.cli.arguments import Choices, choices_options, request_options
from hpc_det.cli.experiment.cleanup import cleanup_daily
from hpc_det.cli.experiment.config import explained
from hpc_det.client.creation import job_scripts, say_notes, submit_new
from hpc_det.client.lookup import store
from hpc_det.config.entrypoint import trial_name
from hpc_det.config.merge import Tree
from hpc_det.config.rank_variables import compat_packages
from hpc_det.config.request import Request, for_test, on_one_slot
from hpc_det.config.secrets import masked
from hpc_det.errors import UsageError, printable, say
from hpc_det.plan.effective import Effective, effective
from hpc_det.plan.multirun import Multirun, effective_multirun
from hpc_det.search.sample import first_sample
from hpc_det.store.attempt import HOOK
from hpc_det.store.experiments import ExperimentStore, state_root
from hpc_det.store.folders import ExperimentFolder
from hpc_det.submit.snapshot import left_out
from hpc_det.submit.submission import source_checkpoint


@click.command()
@request_options
@choices_options
def create(request: Request, choices: Choices) -> None:
    """Create an experiment from a YAML file and the folder of its code.

    CONTEXT_DIR is copied for the job, except the files that its .detignore names; it defaults to the `context_dir` of
    CONFIG, or the current directory. The files and folders of --include are copied next to its contents, under their
    own names.

    Without --follow the last line is `Created experiment N`. The output of a dry run is the job script; --explain adds
    comment lines. --local trains in this process, in CONTEXT_DIR itself: with --test it shows in seconds whether
    everything works together, and with --pdb it stops in the debugger at an exception.

    \b
    Example:
      hpc-det experiment create digits.yaml . --cluster slurm --template small \\
          --config resources.slots_per_trial=8
    """
    submit_or_show(request, choices)


def submit_or_show(request: Request, choices: Choices) -> None:
    """Submit the experiment, train it in this process, or only show it, depending on `choices`."""
    carry_out(effective(as_chosen(request, choices)), choices)


def carry_out(found: Effective, choices: Choices) -> None:
    """Print the notes; then train in this process, submit, or only show the experiment, depending on `choices`."""
    say_notes(found)
    if not choices.local:
        show_and_submit(found, choices)
        return
    if choices.explain:
        show_explained(found)
    run_here(found, test=choices.test, debug=choices.pdb)


def as_chosen(request: Request, choices: Choices) -> Request:
    """Return the request with the overrides of --test and --local. Raises UsageError for --local with --include."""
    if choices.test:
        request = for_test(request)
    if not choices.local:
        return request
    if request.includes:
        raise UsageError("--local: trains in CONTEXT_DIR itself, to which --include cannot add; remove one of them")
    return on_one_slot(request)


def show_and_submit(found: Effective, choices: Choices) -> None:
    """Print the job script or the effective configuration if requested; submit unless it is a dry run."""
    experiments = store()
    if choices.dry_run:
        # what a submission would use, byte for byte; --explain adds comment lines below
        scripts = job_scripts(found, experiments)
        click.echo(scripts[0].encode(), nl=False)
        if len(scripts) > 1:
            say(
                f"note: this is the first of {len(scripts)} scripts that a submission would use: max_array_size of the "
                f"cluster is {found.cluster.max_array_size}"
            )
    if choices.explain:
        show_explained(found)
    if not choices.dry_run:
        _submit(found, experiments, choices)


def show_explained(found: Effective) -> None:
    """Print the effective configuration with the origin of each key, as comment lines of a script."""
    for line in explained(masked(found.tree), found.origins):
        click.echo(f"# {line}")


def _submit(found: Effective, experiments: ExperimentStore, choices: Choices) -> None:
    folder = submit_new(found, experiments, group=choices.shared, is_paused=choices.paused)
    click.echo(f"Created experiment {folder.id}")
    cleanup_daily(experiments)
    if choices.follow:
        show_training(folder)


def show_training(experiment: ExperimentFolder) -> None:
    """Show the training until it ends."""
    from hpc_det.cli.experiment.follow import follow  # loads rich

    follow(experiment)


def submit_or_show_multirun(multirun: Multirun, choices: Choices) -> None:
    """Submit or only show one experiment with a trial for each point of a sweep, depending on `choices`."""
    if choices.local:
        raise UsageError("--local: trains one trial in this process, but a sweep has many; remove --multirun")
    found = effective_multirun(multirun.with_requests(for_test) if choices.test else multirun)
    say_notes(found)
    if not choices.test:  # --test overrides the searcher and the periods, which may make different points equal
        _say_points(multirun, found.points)
    show_and_submit(found, choices)
    if choices.dry_run or choices.explain:
        for number, point in enumerate(multirun.points, 1):
            click.echo(f"# trial {number}: {printable(' '.join(point.overrides))}")


def _say_points(multirun: Multirun, points: Sequence[Tree]) -> None:
    """Print a note for each property of the sweep that may be unintended: a single point, or equal points."""
    if len(points) == 1:
        say("note: -m: no override has several values, such as KEY=A,B; there is only one trial")
    first: dict[str, int] = {}
    for number, point in enumerate(points, 1):
        same = first.setdefault(json.dumps(point, sort_keys=True), number)
        if same != number:
            overrides = printable(" ".join(multirun.points[number - 1].overrides))
            say(f"note: -m: trials {same} and {number} are the same: {overrides}")


def run_here(found: Effective, *, test: bool, debug: bool) -> None:
    """Train the first trial in this process. Raises UsageError if the entrypoint does not name a trial class."""
    name = trial_name(found.tree["entrypoint"])
    if name is None:
        raise UsageError(
            f"--local: the entrypoint {found.tree['entrypoint']!r} names no trial to run in this process; use an "
            f"entrypoint with `--trial module:Class`, or start the script directly"
        )
    if (found.context_dir / HOOK).is_file() and not left_out(found.context_dir)(HOOK):
        say(f"note: {HOOK} is not run by --local; run what it does in this shell first: source {HOOK}")
    _set_environment(found)
    gc.disable()  # imported objects are permanent, and searching them for garbage is slow (see hpc_det.launch.rank)
    from hpc_det.pytorch.loop.harness import run_locally

    gc.freeze()
    gc.enable()
    outcome = run_locally(name, _spec(found), found.context_dir, test=test, debug=debug)
    if test and outcome["kind"] == "finished":
        click.echo("One batch was trained, validated and saved.")
    else:
        click.echo(f"{outcome['kind'].capitalize()} at batch {outcome['steps']}.")


def _set_environment(found: Effective) -> None:
    """Set the environment variables that the ranks of a job would have."""
    variables = found.experiment.environment.variables(found.cluster.slot_type)
    values = {name: value for name, _, value in (variable.partition("=") for variable in variables)}
    os.environ.update(values)
    # Python reads PYTHONPATH only when it starts, so its folders are added to sys.path here.
    folders = filter(None, values.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:0] = [str(found.context_dir / folder) for folder in folders]
    if found.cluster.slot_type == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # hides the GPUs of this machine, as in a job on CPU slots
    if packages := compat_packages(os.environ):
        compat.install(*packages)


def _spec(found: Effective) -> dict[str, Any]:
    """Return the specification of the first trial that the experiment would have."""
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
