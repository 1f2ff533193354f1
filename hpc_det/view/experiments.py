"""Summaries of all experiments below a state root, with an index of those that are finished or paused.

The index is a file with the summaries of inactive experiments, so that a list of a thousand experiments reads only the
active ones and those that are not in the index.

Every change of an inactive experiment leaves a trace: `continue`, `activate` and a late worker add an entry to the
folder of the search's journal, other commands replace a file in the experiment's folder, and a late rank appends to the
metrics of the first trial, which the summary contains if that trial is the only one. So a summary is valid as long as
inode, size and modification time of these three paths are those from before the experiment was read.

The index is replaced as a whole. If two processes do so at the same time, the additions of one are lost, and the next
listing reads those experiments again. If the index is missing, damaged or of another version, all experiments are read.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from hpc_det.errors import HpcDetError
from hpc_det.node.files import is_own, write_atomic
from hpc_det.node.json_files import read_json
from hpc_det.store.experiments import ExperimentStore, is_in_sight
from hpc_det.store.folders import ExperimentFolder
from hpc_det.view.interrupted import remove_unsubmitted
from hpc_det.view.state import ExperimentState, ExperimentView
from hpc_det.view.summary import WITHOUT_FACTS, Summary, summary, unreadable
from hpc_det.view.watch import readable_states


def summaries(store: ExperimentStore) -> list[Summary]:
    """Return the summaries of all experiments, oldest first, including those with damaged files.

    Schedulers are queried only about active experiments.
    """
    found = look(store)
    now, damaged = readable_states(found.under_way)
    readable = [*found.resting, *(summary(view, now[view.id]) for view in found.under_way if view.id in now)]
    damaged_ones = [*found.damaged, *(unreadable(store.folder(number), error) for number, error in damaged.items())]
    return sorted([*readable, *damaged_ones], key=lambda each: each.id)


@dataclass(frozen=True)
class Found:
    """All experiments of a state root, sorted by what their files show. Each list has the oldest first."""

    resting: list[Summary] = field(default_factory=list)
    """Experiments that have ended or are paused."""
    under_way: list[ExperimentView] = field(default_factory=list)
    """Experiments whose jobs may be queued or running. The scheduler was not queried."""
    damaged: list[Summary] = field(default_factory=list)
    """Experiments whose files cannot be read, or are of a newer hpc_det."""


def look(store: ExperimentStore) -> Found:
    """Read all experiments that are active or not in the index, and update the index.

    Also removes what a `create` left behind that was killed before its experiment was complete.
    """
    found, index = Found(), Index(store)
    for experiment in store.folders():
        if not is_in_sight(experiment):
            with suppress(OSError):  # another process removes it, or it belongs to another user
                remove_unsubmitted(experiment)
        elif known := index.find(experiment):
            found.resting.append(known)
        else:
            _read(experiment, index, found)
    index.write()
    return found


def _read(experiment: ExperimentFolder, index: Index, found: Found) -> None:
    trace = trace_of(experiment)  # before reading: a change during the read then makes the summary invalid
    try:
        view = ExperimentView(experiment)
    except HpcDetError as error:
        with suppress(FileNotFoundError):  # it was deleted meanwhile
            found.damaged.append(unreadable(experiment, error))
        return
    if not view.submitter and (settled := view.settled()):
        found.resting.append(summary(view, settled))
        index.keep(found.resting[-1], trace)
    else:
        found.under_way.append(view)


# --- the index


SETTLES_S = 2.0
"""Seconds since the last change of a file after which its trace is reliable. File systems record times in steps: two
changes within one step have the same time.
"""

Trace = list[list[int]]
"""For each path: inode, size in bytes, and modification time in ns; empty if the path does not exist."""


class Index:
    """The index: summaries of inactive experiments, keyed by the number of the experiment."""

    def __init__(self, store: ExperimentStore) -> None:
        self._file = store.index
        self._kept = _read_index(store.index)
        self._asked_for: set[int] = set()
        """The experiments for which `find` was called. All others were deleted, so `write` drops them."""
        self._has_news = False

    def find(self, experiment: ExperimentFolder) -> Summary | None:
        """Return the summary of the experiment, or None if there is none or the experiment has changed since."""
        self._asked_for.add(experiment.id)
        trace, found = self._kept.get(experiment.id, ([], None))
        return found if found and trace == trace_of(experiment) else None

    def keep(self, found: Summary, trace: Trace) -> None:
        """Keep the summary of an inactive experiment. `trace`: its `trace_of` from before its files were read."""
        changed = max((path[-1] for path in trace if path), default=0) / 1e9
        # abs: the clock of a file server may be ahead of this machine's
        if found.name not in WITHOUT_FACTS and abs(time.time() - changed) > SETTLES_S:
            self._kept[found.id] = trace, found
            self._has_news = True

    def write(self) -> None:
        """Write the index if it has changed.

        A full disk or a folder of another user is not an error, since the index only saves time.
        """
        if not self._has_news or not is_own(self._file.parent):
            return
        kept = ((number, self._kept[number]) for number in self._asked_for & self._kept.keys())
        plain = {number: [trace, asdict(found)] for number, (trace, found) in kept}
        with suppress(OSError):
            write_atomic(self._file, json.dumps(plain), private=True)


def trace_of(experiment: ExperimentFolder) -> Trace:
    """Return the trace of the three paths that every change of an inactive experiment touches."""
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
    if known.keys() | {"state"} != _FIELDS:
        raise TypeError("a summary of another version of hpc_det")
    return Summary(state=ExperimentState(state), **known)  # type: ignore[arg-type]


_FIELDS = {each.name for each in fields(Summary)}
