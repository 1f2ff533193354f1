"""All experiments below a state root: each in a line, and those that have not ended.

Only those that somebody works on are read, and those that the index does not know.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

from hpc_det.errors import HpcDetError
from hpc_det.store.experiments import ExperimentStore, is_in_sight
from hpc_det.store.folders import ExperimentFolder
from hpc_det.view.index import Index, trace_of
from hpc_det.view.interrupted import remove_unsubmitted
from hpc_det.view.state import ExperimentState, ExperimentView
from hpc_det.view.summary import DAMAGED, NOT_SHOWN, Summary, summary
from hpc_det.view.watch import readable_states


def summaries(store: ExperimentStore) -> list[Summary]:
    """Of all experiments, oldest first. One with damaged files hides no other. The scheduler is asked about those that
    do not rest.
    """
    found = look(store)
    now, damaged = readable_states(found.under_way)
    told = [*found.resting, *(summary(view, now[view.id]) for view in found.under_way if view.id in now)]
    damaged_ones = [*found.damaged, *(_damaged(store.folder(number)) for number in damaged)]
    return sorted([*told, *damaged_ones], key=lambda each: each.id)


def under_way(store: ExperimentStore) -> list[ExperimentView]:
    """Experiments that have not ended, as far as their files tell, oldest first: their jobs may be in a queue or run.

    Nobody is asked. Paused ones are among them.
    """
    found = look(store)
    paused = [store.folder(each.id) for each in found.resting if not each.state.is_final]
    return sorted([*found.under_way, *map(ExperimentView, paused)], key=lambda view: view.id)


@dataclass(frozen=True)
class Found:
    """By one look at all experiments, each of them oldest first. The index is brought up to date on the way."""

    resting: list[Summary] = field(default_factory=list)
    under_way: list[ExperimentView] = field(default_factory=list)
    damaged: list[Summary] = field(default_factory=list)


def look(store: ExperimentStore) -> Found:
    found, index = Found(), Index(store)
    for experiment in store.folders():
        if not is_in_sight(experiment):
            with suppress(OSError):  # another process removes it, or it is somebody else's
                remove_unsubmitted(experiment)
        elif known := index.find(experiment):
            found.resting.append(known)
        else:
            _read(experiment, index, found)
    index.write()
    return found


def _read(experiment: ExperimentFolder, index: Index, found: Found) -> None:
    trace = trace_of(experiment)
    try:
        view = ExperimentView(experiment)
    except HpcDetError:
        with suppress(FileNotFoundError):  # it was deleted meanwhile
            found.damaged.append(_damaged(experiment))
        return
    if not view.submitter and (settled := view.settled()):
        found.resting.append(summary(view, settled))
        index.keep(found.resting[-1], trace)
    else:
        found.under_way.append(view)


def _damaged(experiment: ExperimentFolder) -> Summary:
    name = DAMAGED if experiment.is_own() else NOT_SHOWN
    return Summary(id=experiment.id, name=name, state=ExperimentState.ERROR)
