"""Continue experiments that have ended or are paused, and repeat them as new experiments (forks)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hpc_det.config.conf_files import find
from hpc_det.config.plain_yaml import load_yaml
from hpc_det.config.request import Request
from hpc_det.errors import UsageError, count
from hpc_det.schedulers.shared_answers import ASK_S
from hpc_det.store.experiment_config import write_about
from hpc_det.store.folders import ExperimentFolder
from hpc_det.store.local_run import insist_on_jobs
from hpc_det.submit.again import go_on, stored, submit_again
from hpc_det.view.state import ExperimentState, ExperimentView
from hpc_det.view.watch import state

if TYPE_CHECKING:
    from hpc_det.plan.effective import Effective


def continue_one(experiment: ExperimentFolder, overrides: Sequence[str]) -> int:
    """Continue an experiment that has ended, with `a.b=value` overrides, and return the number of trials that train.

    Raises UsageError if the experiment has not ended or nothing is left to do.
    """
    insist_on_jobs(experiment)
    view = ExperimentView(experiment)
    if not (found := state(view)).is_final:
        raise UsageError(
            f"experiment {experiment.id} is {found.value}; wait for its end, or end it with "
            f"`hpc-det experiment kill {experiment.id}`"
        )
    trials = go_on(experiment, overrides)
    if view.about().archived:  # otherwise listings would hide a running experiment
        write_about(experiment, archived=False)
    return trials


def forked(
    experiment: ExperimentFolder,
    overrides: Sequence[str],
    cluster: str | None = None,
    change: Callable[[Request], Request] = lambda request: request,
) -> Effective:
    """Return the effective configuration of a fork, with `a.b=value` overrides.

    `cluster`: name of another cluster profile than the experiment's. `change`: further overrides, such as `for_test`.
    Raises UsageError with all problems.
    """
    if experiment.sweep.exists():
        raise UsageError(
            f"experiment {experiment.id}: is a sweep of a Hydra app, which only the app can start; start the app "
            f"again, or repeat only what failed with `hpc-det experiment continue {experiment.id}`"
        )
    profile = load_yaml(find("cluster", cluster, os.environ)) if cluster else None
    return stored(experiment, overrides, profile, change=change)


def _instead_of_activate(experiment_id: int, found: ExperimentState) -> str:
    """Return the command for an experiment that is not paused."""
    if found is ExperimentState.COMPLETED:
        return f"run this one again with `hpc-det experiment fork {experiment_id}`"
    if found.is_final:
        return f"continue this one with `hpc-det experiment continue {experiment_id}`"
    return f"watch this one with `hpc-det experiment logs -f {experiment_id}`"


LEAVE_S = 60.0  # seconds that `activate` waits for trials that are still saving


def activate_one(experiment: ExperimentFolder) -> str:
    """Resume a paused experiment and return a sentence for the user.

    Raises UsageError if the experiment is not paused, or if its trials are still saving after LEAVE_S seconds.
    """
    insist_on_jobs(experiment)
    view = ExperimentView(experiment)
    end = time.monotonic() + LEAVE_S
    while (found := state(view)) is not ExperimentState.PAUSED:
        if not view.search.paused or found.is_final:
            raise UsageError(
                f"experiment {experiment.id} is {found.value}; only a paused experiment can be activated; "
                f"{_instead_of_activate(experiment.id, found)}"
            )
        if time.monotonic() > end:
            raise UsageError(
                f"experiment {experiment.id} is still {found.value}: its trials are saving; try again later"
            )
        time.sleep(ASK_S)
    trials = submit_again(experiment)
    return f"Activated experiment {experiment.id}: {count(trials, 'trial')}"
