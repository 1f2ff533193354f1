"""hpc-det experiment continue, and fork."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import click

from hpc_det.cli.create import say_notes, show, show_and_submit
from hpc_det.cli.local import run_here
from hpc_det.cli.parameters import Choices
from hpc_det.config.plain_yaml import load_yaml
from hpc_det.config.request import find
from hpc_det.errors import UsageError
from hpc_det.node.json_files import read_json
from hpc_det.schedulers.shared_answers import ASK_S
from hpc_det.store.experiment_config import write_about
from hpc_det.store.folders import ExperimentFolder
from hpc_det.submit.again import go_on, set_once_more, stored, submit_again
from hpc_det.view.state import ExperimentState, ExperimentView
from hpc_det.view.watch import state

LEAVE_S = 60.0
"""How long `activate` waits for trials that still save."""


def continue_(experiment: ExperimentFolder, overrides: Sequence[str], *, follow: bool) -> None:
    """Raises UsageError for an experiment that has not ended, or with nothing left to do."""
    found = state(ExperimentView(experiment))
    if not found.is_final:
        raise UsageError(
            f"experiment {experiment.id} is {found.value}; wait for its end, or end it with "
            f"`hpc-det experiment kill {experiment.id}`"
        )
    trials = go_on(experiment, overrides)
    if ExperimentView(experiment).about().archived:  # lists would leave out what trains again
        write_about(experiment, archived=False)
    click.echo(f"Continued experiment {experiment.id}: {trials} trial{'s' * (trials > 1)}")
    if follow:
        show(experiment)


def activate(experiment: ExperimentFolder) -> str:
    """What was done, in a sentence.

    Raises UsageError for an experiment that is not paused, or whose trials have not left within a minute.
    """
    view = ExperimentView(experiment)
    end = time.monotonic() + LEAVE_S
    while (found := state(view)) is not ExperimentState.PAUSED:
        if not view.search.paused or found.is_final:
            raise UsageError(f"experiment {experiment.id} is {found.value}; only a paused one can be activated")
        if time.monotonic() > end:
            raise UsageError(f"experiment {experiment.id} is still {found.value}: its trials save; try again later")
        time.sleep(ASK_S)
    trials = submit_again(experiment)
    return f"Activated experiment {experiment.id}: {trials} trial{'s' * (trials > 1)}"


def set_max_slots(experiment: ExperimentFolder, slots: int) -> str:
    """What was done, in a sentence. Raises UsageError for a number that no trial fits into."""
    needed = (read_json(experiment.effective) or {})["resources"]["slots_per_trial"]
    if slots < needed:
        raise UsageError(f"experiment {experiment.id}: max-slots {slots}: a trial has {needed}; give at least as many")
    set_once_more(experiment, [f"resources.max_slots={slots}"])
    return f"Experiment {experiment.id} has at most {slots} slots, from its next jobs on"


def fork(experiment: ExperimentFolder, overrides: Sequence[str], cluster: str | None, choices: Choices) -> None:
    if experiment.sweep.exists():
        raise UsageError(
            f"experiment {experiment.id}: is a sweep of a Hydra app, and only the app can start that; start the app "
            f"again, or only what failed with `hpc-det experiment continue {experiment.id}`"
        )
    profile = load_yaml(find("cluster", cluster, os.environ)) if cluster else None
    found = stored(experiment, overrides, profile)
    say_notes(found)
    if choices.local:
        run_here(found, test=choices.test, debug=choices.pdb)
    else:
        show_and_submit(found, choices)
