"""All experiments below a state root: each in a line, and those that have not ended.

Only those that somebody works on are read, and those that the index does not know: a file that keeps the summaries of
experiments that rest, so that a list of a thousand need not read them all again.

Nobody works on such an experiment, and whoever changes it leaves a trace: `continue`, `activate` and a worker that is
late write an entry into its search's journal, all others replace a file of its folder, and a rank that is late appends
to its metrics, which count where there is one trial. So what is kept stands as long as these three are what they were
when the experiment was read.

The index is replaced as a whole. Of two processes that do so at once, one has done it for nothing; where it is missing,
damaged or another version's, all experiments are read.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hpc_det.errors import HpcDetError
from hpc_det.node.files import is_own, write_atomic
from hpc_det.node.json_files import read_json
from hpc_det.store.experiments import ExperimentStore, is_in_sight
from hpc_det.store.folders import ExperimentFolder
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


@dataclass(frozen=True)
class Found:
    """By one look at all experiments, each of them oldest first. The index is brought up to date on the way."""

    resting: list[Summary] = field(default_factory=list)
    under_way: list[ExperimentView] = field(default_factory=list)
    """Their jobs may be in a queue or run, as far as files tell: the scheduler is not asked."""
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


# --- the index


SETTLES_S = 2.0
"""File systems tell times in steps: a change within the same one as the last leaves no trace."""

Trace = list[list[int]]
"""Of each path: inode, size and time of change in ns; nothing where it is missing."""


class Index:
    """Summaries of experiments that rest."""

    def __init__(self, store: ExperimentStore) -> None:
        self._file = store.index
        self._kept = _read_index(store.index)
        self._asked_for: set[int] = set()
        """Experiments that are there."""
        self._has_news = False

    def find(self, experiment: ExperimentFolder) -> Summary | None:
        """What is known of the experiment, where it has not changed since."""
        self._asked_for.add(experiment.id)
        trace, found = self._kept.get(experiment.id, ([], None))
        return found if found and trace == trace_of(experiment) else None

    def keep(self, found: Summary, trace: Trace) -> None:
        """Of an experiment that rests. `trace`: from before its files were read."""
        changed = max((path[-1] for path in trace if path), default=0) / 1e9
        if found.name != DAMAGED and abs(time.time() - changed) > SETTLES_S:
            self._kept[found.id] = trace, found
            self._has_news = True

    def write(self) -> None:
        """If there is anything new. Nothing depends on it: a full disk, or a folder of somebody else, is no error."""
        if not self._has_news or not is_own(self._file.parent):
            return
        kept = ((number, self._kept[number]) for number in self._asked_for & self._kept.keys())
        plain = {number: [trace, asdict(found)] for number, (trace, found) in kept}
        with suppress(OSError):
            write_atomic(self._file, json.dumps(plain), private=True)


def trace_of(experiment: ExperimentFolder) -> Trace:
    return [_trace(path) for path in (experiment.path, experiment.search, experiment.trial().metrics)]


def _trace(path: Path) -> list[int]:
    try:
        found = os.stat(path)
    except OSError:
        return []
    return [found.st_ino, found.st_size, found.st_mtime_ns]


def _read_index(path: Path) -> dict[int, tuple[Trace, Summary]]:
    with suppress(OSError, ValueError, TypeError, AttributeError):
        return {
            int(number): (trace, _summary_of(**plain)) for number, (trace, plain) in (read_json(path) or {}).items()
        }
    return {}


def _summary_of(state: str, **known: object) -> Summary:
    return Summary(state=ExperimentState(state), **known)  # type: ignore[arg-type]  # TypeError is what it may raise
