"""The best trial of a search."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hpc_det.search.method import better
from hpc_det.search.state import Entry


@dataclass(frozen=True, kw_only=True)
class BestTrial:
    """By all reports to the search."""

    trial: int
    metric: str
    value: float
    length: int | None
    """At that report, in the unit of searcher.max_length."""


def best_trial(told: Iterable[Entry], searcher: Mapping[str, Any]) -> BestTrial | None:
    """`told`: the journal's entries, or those of them that are reports. None where no trial has reported a number."""
    best: BestTrial | None = None
    for entry in told:
        value = entry.get("value")
        if value is not None and better(value, best.value if best else None, searcher["smaller_is_better"]):
            best = BestTrial(trial=entry["trial"], metric=searcher["metric"], value=value, length=entry["until"])
    return best
