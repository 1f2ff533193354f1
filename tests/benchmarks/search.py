"""Measure a search: the time of a decision among 10,000 trials, and the load of 500 workers with slow storage."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

from hpc_det.search.by_name import search_method
from hpc_det.search.method import Work
from hpc_det.search.simulate import at_random, simulate
from tests.benchmarks.table import show

TRIALS = 10_000
LAST = 1000
"""Number of decisions at the end of the search, when its rungs are fullest."""
WORKERS, FIRST_RUNG_S, LATENCY_S, HOURS = 500, 60, 0.05, 12
ADAPTIVE = {
    "name": "adaptive_asha",
    "smaller_is_better": True,
    "max_length": {"batches": FIRST_RUNG_S * 4**4},
    "max_trials": TRIALS,
    "max_concurrent_trials": WORKERS,
    "mode": "standard",
    "max_rungs": 5,
    "divisor": 4,
    "bracket_rungs": [],
    "stop_once": False,
}
SEARCHERS: dict[str, dict[str, Any]] = {
    "random": {**ADAPTIVE, "name": "random"},
    "async_halving": {**ADAPTIVE, "name": "async_halving", "num_rungs": 5},
    "async_halving, stop_once": {**ADAPTIVE, "name": "async_halving", "num_rungs": 5, "stop_once": True},
    "adaptive_asha": ADAPTIVE,
    "adaptive_asha, stop_once": {**ADAPTIVE, "stop_once": True},
}


def main() -> None:
    show(
        f"A decision (report, what next, start) among {TRIALS:,} trials; the goal is under 5 ms",
        [
            "searcher",
            "decisions",
            f"median of the last {LAST:,} [µs]",
            "999 of 1,000 are below [µs]",
            "all together [s]",
        ],
        (_row(name, searcher) for name, searcher in SEARCHERS.items()),
    )
    show(
        f"adaptive_asha in virtual time: {WORKERS} workers, {FIRST_RUNG_S} s to the first rung, divisor 4, {HOURS} h,"
        f" each decision behind {1000 * LATENCY_S:.0f} ms of storage; the goal is 99.9 % busy",
        ["form", "decisions", "trials", "workers busy [%]", "simulated in [s]"],
        (_busy(name) for name in ("adaptive_asha", "adaptive_asha, stop_once")),
    )


def _row(name: str, searcher: dict[str, Any]) -> list[str]:
    microseconds = [1e6 * seconds for seconds in _decisions(searcher)]
    return [
        name,
        f"{len(microseconds):,}",
        f"{statistics.median(microseconds[-LAST:]):.1f}",
        f"{statistics.quantiles(microseconds, n=1000)[-1]:.0f}",
        f"{sum(microseconds) / 1e6:.2f}",
    ]


def _decisions(searcher: dict[str, Any]) -> Iterator[float]:
    """Yield the seconds of each decision, with as many works in progress as there are workers."""
    method, value = search_method(searcher), at_random()
    works: list[Work] = []
    while len(works) < WORKERS and (work := method.next_work()):
        method.start(work)
        works.append(work)
    for done in works:  # the list grows during the loop
        number = value(done)
        began = time.process_time()  # a decision is computation alone, so time of other processes does not count
        method.report(done.trial, number)
        if work := method.next_work():
            method.start(work)
        yield time.process_time() - began
        if work:
            works.append(work)


def _busy(name: str) -> list[str]:
    searcher = {**SEARCHERS[name], "max_trials": 20 * TRIALS}  # more than fit into 12 hours
    began = time.perf_counter()
    played = simulate(search_method(searcher), at_random(), workers=WORKERS, latency_s=LATENCY_S, ends_s=HOURS * 3600.0)
    return [
        name,
        f"{played.decisions:,}",
        f"{len(played.reached):,}",
        f"{100 * played.busy:.3f}",
        f"{time.perf_counter() - began:.1f}",
    ]


if __name__ == "__main__":
    main()
