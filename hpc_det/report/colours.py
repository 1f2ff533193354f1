"""Which colour a trial has, the same in every picture: by its place among all trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

COLOURS = 7
"""v0 for the best trials to v6 for the worst, as page.css has them; vx where nobody knows a value."""
Trial = Mapping[str, Any]
Thing = TypeVar("Thing")


@dataclass(frozen=True)
class Colours:
    classes: dict[int, str]
    """Of each trial, the one that is drawn last and so on top is the best."""
    best: int | None

    @classmethod
    def of(cls, trials: Sequence[Trial], *, smaller_is_better: bool, best: int | None) -> Colours:
        """`best`: the trial that stands out, if any."""
        sign = 1 if smaller_is_better else -1
        values = {trial["id"]: value_of(trial) for trial in trials}
        known = sorted((sign * value, trial) for trial, value in values.items() if value is not None and trial != best)
        classes = {trial: "vx" for trial, value in values.items() if value is None}
        for place in reversed(range(len(known))):
            classes[known[place][1]] = f"v{place * COLOURS // len(known)}"
        if best in values:
            classes.pop(best, None)
            classes[best] = "v0 best"
        return cls(classes, best)

    def in_order(self, by_trial: Mapping[int, Thing]) -> dict[int, Thing]:
        """The best one last."""
        return {trial: by_trial[trial] for trial in self.classes if trial in by_trial}


def value_of(trial: Trial) -> float | None:
    """Of the searcher's metric: its best validation, or else what the trial told the search. None: no finite number."""
    value = trial["best"]["value"] if trial["best"] else trial["reported"]
    return value if isinstance(value, (int, float)) else None
