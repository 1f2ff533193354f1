"""Measure a search's journal: reading 100,000 entries, and computing the state of the search from them."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hpc_det.search.journal import SearchJournal
from hpc_det.search.state import SearchState
from hpc_det.store import shared_log
from hpc_det.store.folders import ExperimentFolder
from hpc_det.store.shared_log import SharedLog
from tests.benchmarks.table import show
from tests.search.experiments import experiment

ENTRIES, WORKERS, ROUNDS, APPENDS = 100_000, 500, 5, 200
LEFT = {"event": "left", "worker": 1}
SEARCHER = {"name": "adaptive_asha", "max_trials": 80_000, "max_length": {"batches": 1024}, "max_rungs": 5}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        searched = experiment(Path(folder) / "long", mode="standard", **SEARCHER)
        fill(searched, ENTRIES)
        new = experiment(Path(folder) / "new", mode="standard", **SEARCHER)
        log = SharedLog(new.search)
        rows = [
            ("read all entries", seconds(lambda: sum(1 for _ in SharedLog(searched.search).new()), ROUNDS)),
            ("come to the state of the search", seconds(lambda: SearchJournal(searched).state(), ROUNDS)),
            (
                "append one entry, without the wait for the disk",
                seconds(lambda: log.append({"event": "left", "worker": 1}), APPENDS),
            ),
        ]
    show(
        f"The journal of a search, {ENTRIES:,} entries of {WORKERS} workers; the goal is under 1 s",
        ["what", "median [ms]"],
        ([what, f"{1000 * median:.1f}"] for what, median in rows),
    )


def fill(folder: ExperimentFolder, count: int) -> None:
    """Write the journal of a search with `count` entries, as whole chunks."""
    state, lines = SearchJournal(folder).state(), []
    for entry in entries(state):
        lines.append(json.dumps(entry))
        state.apply(entry)
        if len(lines) == count:
            break
    log = SharedLog(folder.search)
    for first in range(0, count, shared_log.CHUNK):
        log._sealed(first).write_text("\n".join(lines[first : first + shared_log.CHUNK]) + "\n")


def entries(state: SearchState) -> Iterator[dict[str, Any]]:
    """Yield the entries of workers that start, and report forever."""
    for worker in range(WORKERS):
        yield {"event": "asked", "worker": worker, "job": f"4711_{worker}", "time": 1.5e9}
    while True:
        for worker, work in list(state.open.items()):
            value = (work.trial * 7919 % 10_007) / 10_007 + 1 / (work.until or 1)
            report = {"worker": worker, "trial": work.trial, "until": work.until, "value": value, "time": 1.5e9}
            yield {"event": "reported", **report}


def seconds(act: Callable[[], object], rounds: int) -> float:
    """Return the median of several runs [s of CPU time]."""
    times = []
    for _ in range(rounds):
        began = time.process_time()  # time of other processes does not count
        act()
        times.append(time.process_time() - began)
    return statistics.median(times)


if __name__ == "__main__":
    main()
