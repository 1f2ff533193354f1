"""Where the time of trials went, as facts: a verdict for each that was profiled, and one of them over its batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hpc_det.store.folders import TrialFolder
from hpc_det.view.performance.limits import slowest
from hpc_det.view.performance.measured import measured
from hpc_det.view.performance.system import over_batches
from hpc_det.view.performance.timings import Stretch, total

Record = dict[str, Any]
MOST_COLUMNS = 120
"""Of a picture: more could not be told apart."""


def course_of(trial: TrialFolder) -> Record:
    """Of a trial with timings: how the time of its slowest rank, and the use of all nodes, went over the batches.

    {"trial", "rank", "host", "columns": [{"first", "last", "seconds": {part: s}}],
     "system": {metric: [[batches, mean, lowest, highest]]}}
    """
    found = measured(trial)
    rank = slowest(found.ranks)
    columns = list(_columns(found.timings[rank.rank]))
    return {
        "trial": trial.id,
        "rank": rank.rank,
        "host": rank.host,
        "columns": [_column(stretches) for stretches in columns],
        "system": over_batches(trial.profile, found.timings, [stretches[-1].batches for stretches in columns]),
    }


def _columns(stretches: Sequence[Stretch]) -> Iterator[Sequence[Stretch]]:
    """Neighbours together, where there are too many."""
    parts = min(len(stretches), MOST_COLUMNS)
    for part in range(parts):
        yield stretches[part * len(stretches) // parts : (part + 1) * len(stretches) // parts]


def _column(stretches: Sequence[Stretch]) -> Record:
    seconds = {part.value: amount for part, amount in total(stretches).parts().items()}
    return {"first": stretches[0].first, "last": stretches[-1].batches, "seconds": seconds}
