"""All experiments below a state root: a summary of each, and those that have not ended.

Only active experiments are read, and those that are not in the index, a file with summaries of the others, so that a
list of a thousand need not read all of them.

Every change of an inactive experiment leaves a trace: `continue`, `activate` and a late worker write an entry into the
search's journal, other commands replace a file in the experiment's folder, and a late rank appends to its metrics,
which count with a single trial. So a summary is valid as long as these three are as they were when the experiment was
read.

The index is replaced as a whole. If two processes do so at the same time, one of them works in vain. If it is missing,
damaged or of another version, all experiments are read.
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
    """Return the summaries of all experiments, oldest first. Damaged files of one do not hide others.

    The scheduler is asked about active experiments.
    """
    found = look(store)
    now, damaged = readable_states(found.under_way)
    told = [*found.resting, *(summary(view, now[view.id]) for view in found.under_way if view.id in now)]
    damaged_ones = [*found.damaged, *(_damaged(store.folder(number)) for number in damaged)]
    return sorted([*told, *damaged_ones], key=lambda each: each.id)


@dataclass(frozen=True)
class Found:
    """The result of one look at all experiments, each list oldest first. The index is updated on the way."""

    resting: list[Summary] = field(default_factory=list)
    under_way: list[ExperimentView] = field(default_factory=list)
    """Experiments whose jobs may be queued or running, as far as files show, without asking the scheduler."""
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
"""Seconds after which a file counts as unchanged: file systems record times in steps, so a change within one leaves no
trace.
"""

Trace = list[list[int]]
"""For each path, its inode, size and time of change in ns; empty if it is missing."""


class Index:
    """Summaries of inactive experiments."""

    def __init__(self, store: ExperimentStore) -> None:
        self._file = store.index
        self._kept = _read_index(store.index)
        self._asked_for: set[int] = set()
        """Numbers of existing experiments."""
        self._has_news = False

    def find(self, experiment: ExperimentFolder) -> Summary | None:
        """Return the summary of the experiment, if it has not changed since."""
        self._asked_for.add(experiment.id)
        trace, found = self._kept.get(experiment.id, ([], None))
        return found if found and trace == trace_of(experiment) else None

    def keep(self, found: Summary, trace: Trace) -> None:
        """Keep the summary of an inactive experiment. `trace`: taken before its files were read."""
        changed = max((path[-1] for path in trace if path), default=0) / 1e9
        if found.name != DAMAGED and abs(time.time() - changed) > SETTLES_S:
            self._kept[found.id] = trace, found
            self._has_news = True

    def write(self) -> None:
        """Write the index if it has changed. A full disk, or another user's folder, is not an error: nothing depends on
        the index.
        """
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
