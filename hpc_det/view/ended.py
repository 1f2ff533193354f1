"""Whether experiments have ended, for whoever would take something away from them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpc_det.checkpoint.retention import source_of
from hpc_det.errors import HpcDetError, UsageError
from hpc_det.store.experiments import ExperimentStore
from hpc_det.store.folders import ExperimentFolder
from hpc_det.view.state import ExperimentView
from hpc_det.view.watch import readable_states


def insist_on_end(experiments: Sequence[ExperimentFolder]) -> None:
    """Raises UsageError naming all that have not ended, and those whose damaged files do not tell."""
    views: list[ExperimentView] = []
    damaged: dict[Path, HpcDetError] = {}
    for experiment in experiments:
        try:
            views.append(ExperimentView(experiment))
        except HpcDetError as error:
            damaged[experiment.path] = error
    found, unreadable = readable_states(views)
    damaged |= {view.folder.path: unreadable[view.id] for view in views if view.id in unreadable}
    problems = [
        f"{error}; nothing tells whether it has ended: where no job of it is left, see `hpc-det job list`, "
        f"remove {path} by hand"
        for path, error in damaged.items()
    ]
    problems += [
        f"experiment {number} is {state.value}; end it first with `hpc-det experiment kill {number}`"
        for number, state in found.items()
        if not state.is_final
    ]
    problems += [
        f"experiment {view.id}: {view.submitter} submits its jobs, or was killed while it did; try again in a moment"
        for view in views
        if view.submitter
    ]
    if problems:
        raise UsageError(problems)


def beginning_with(folders: Sequence[Path], root: Path) -> list[str]:
    """A sentence for each experiment below the state root that has not ended and whose trials begin with weights from
    below `folders`.
    """
    named = [
        (experiment, source)
        for experiment in ExperimentStore(root).all()
        if (source := source_of(experiment)) and any(source.is_relative_to(folder) for folder in folders)
    ]
    running, _ = readable_states(ExperimentView(experiment) for experiment, _ in named)
    return [
        f"experiment {experiment.id} is {running[experiment.id].value}, and its trials begin with the weights in "
        f"{source}: those that have not begun would fail"
        for experiment, source in named
        if experiment.id in running and not running[experiment.id].is_final
    ]
