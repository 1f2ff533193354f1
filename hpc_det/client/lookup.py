"""Find experiments and trials: by number, by owner, or by their state, name and labels."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from hpc_det.errors import UsageError
from hpc_det.store.experiments import ExperimentStore, root_of, state_root
from hpc_det.store.folders import ExperimentFolder, TrialFolder

if TYPE_CHECKING:
    from hpc_det.view.summary import Summary


def store(owner: str | None = None) -> ExperimentStore:
    """Return the user's own experiments, or those of `owner`, given as a user name or an HPC_DET_ROOT.

    Raises UsageError if the owner has no experiments.
    """
    if not owner:
        return ExperimentStore(state_root(os.environ))
    found = ExperimentStore(root_of(owner, os.environ))
    try:
        found.folder(1).path.parent.stat()  # the folder of all experiments, which the first one creates
    except FileNotFoundError:
        raise UsageError(
            f"{owner}: no experiments found below {found.root}; pass the owner's HPC_DET_ROOT instead of the name"
        ) from None
    except PermissionError:
        pass  # the folder exists; reading an experiment in it reports the missing permission
    return found


def insist_on_own(experiment: ExperimentFolder) -> ExperimentFolder:
    """Return the experiment if it belongs to the user; raise UsageError otherwise."""
    # the owner decides, even if file permissions would allow a change: a group may only view and fork
    if experiment.is_own():
        return experiment
    named = experiment.named()
    raise UsageError(
        f"experiment {named}: belongs to {experiment.owner()}, and only its owner may change it; view it with `hpc-det "
        f"experiment describe {named}` and `hpc-det experiment logs {named}`, or run a copy of your own with "
        f"`hpc-det experiment fork {named}`"
    )


def created_trial(experiment: ExperimentFolder, number: int) -> TrialFolder:
    """Return a trial of the experiment; raise UsageError if the search has not created it."""
    from hpc_det.view.state import ExperimentView  # not needed by commands that only name experiments

    created = ExperimentView(experiment).search.trials
    if number in created:
        return experiment.trial(number)
    has = f"its trials are 1 to {max(created)}" if created else "no trial has been created"
    raise UsageError(
        f"experiment {experiment.id}: no trial {number} yet; {has}; see `hpc-det experiment list-trials "
        f"{experiment.named()}`"
    )


def selected(
    store: ExperimentStore,
    *,
    states: Sequence[str] = (),
    name: str | None = None,
    labels: Sequence[str] = (),
    with_archived: bool = False,
) -> Iterator[Summary]:
    """Yield the summaries of the experiments that match all conditions, oldest first.

    `states`: one of these; `labels`: all of these; an empty sequence or None matches every experiment.
    """
    from hpc_det.view.experiments import summaries  # as above

    for found in summaries(store):
        is_wanted = (not states or found.state in states) and name in (None, found.name)
        if is_wanted and set(labels) <= set(found.labels) and (with_archived or not found.archived):
            yield found
