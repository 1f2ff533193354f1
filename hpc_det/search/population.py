"""Population based training: bad trials continue as copies of good ones, with changed hyperparameters.

Jaderberg et al., "Population Based Training of Neural Networks" (2017), in its asynchronous form: whenever a trial
reports, it is compared with the latest reports of all others, so no trial waits. Only hpc_det.sgd.tune uses it, since
the trials of experiments keep their hyperparameters.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, NamedTuple

from hpc_det.search.method import Exit, Work
from hpc_det.search.sample import Sampler, Space, base_of, is_nested, kind_of, sample

RESAMPLED = 0.25
"""Default of the probability that a changed hyperparameter is drawn again from its range."""
DRAWN = "drawn"
"""Type of a hyperparameter whose values a function draws: {"type": DRAWN, "vals": values that it has drawn}."""
FACTORS = (0.8, 1.2)
"""Factors for all other changed hyperparameters; one of them is drawn."""


class Member(NamedTuple):
    """The hyperparameters and the source of a trial's next training."""

    hparams: dict[str, Any]
    source: int | None
    """The trial whose latest checkpoint it loads first; None: its own."""


class Population:
    """Population based training as a search method.

    Each call is O(n) in the number of trials, which is a few dozen.
    """

    def __init__(self, searcher: Mapping[str, Any], space: Space, first: Sampler, seed: int) -> None:
        """`searcher`: {"max_trials", "max_length": {unit: length}, "interval", "quantile", "smaller_is_better"}.

        It may contain "mutations", the space of the hyperparameters to change (default: `space`), and "resampled".
        """
        self.trials_expected: int = searcher["max_trials"]
        self._length: int = next(iter(searcher["max_length"].values()))
        self._interval: int = searcher["interval"]
        self._quantile: float = searcher["quantile"]
        self._sign = 1 if searcher["smaller_is_better"] else -1
        self._mutations: Space = searcher.get("mutations") or space
        self._resampled: float = searcher.get("resampled", RESAMPLED)
        self._first, self._seed = first, seed
        self._working: dict[int, Work] = {}
        self._waiting: dict[int, Work] = {}
        self._closed: set[int] = set()
        self._values: dict[int, float] = {}
        """The last reported value of each trial; smaller is better."""
        self._members: dict[int, Member] = {}
        self._trained = 0

    def member(self, trial: int) -> Member:
        """Return the hyperparameters and source that were decided at the trial's last report."""
        return self._members.get(trial) or Member(self._first.sample(trial).hparams, None)

    def next_work(self) -> Work | None:
        """Return work for a new trial if one is missing, else for the waiting trial that has trained least."""
        created = len(self._working) + len(self._waiting) + len(self._closed)
        if created < self.trials_expected:
            return Work(created + 1, min(self._interval, self._length))
        # The one that is furthest behind, since comparing trials is fair only at similar lengths.
        return min(self._waiting.values(), key=lambda work: (work.until, work.trial), default=None)

    def start(self, work: Work) -> None:
        self._waiting.pop(work.trial, None)
        self._working[work.trial] = work

    def report(self, trial: int, value: float) -> None:
        until = self._working.pop(trial).until
        assert until is not None, trial
        self._trained = max(self._trained, until)
        self._values[trial] = math.inf if math.isnan(value) else self._sign * value
        if until >= self._length:
            self._closed.add(trial)
            return
        self._waiting[trial] = Work(trial, min(until + self._interval, self._length))
        self._members[trial] = self._exploited(trial, until)

    def end(self, trial: int, how: Exit) -> None:
        """Close the trial, and exclude it from comparisons."""
        self._working.pop(trial, None)
        self._waiting.pop(trial, None)
        self._values.pop(trial, None)
        self._closed.add(trial)

    def give_back(self, trial: int) -> None:
        self._waiting[trial] = self._working.pop(trial)

    def is_closed(self, trial: int) -> bool:
        return trial in self._closed

    @property
    def finished(self) -> bool:
        return len(self._closed) == self.trials_expected

    @property
    def progress(self) -> float:
        return len(self._closed) / self.trials_expected

    def _exploited(self, trial: int, until: int) -> Member:
        """Return the member for the trial's next training.

        A trial among the worst becomes a copy of one of the best, with changed hyperparameters; any other one keeps its
        own.
        """
        ranked = sorted(self._values, key=lambda number: (self._values[number], number))
        # At most half of the trials, so that none is both among the best and among the worst.
        share = min(math.ceil(len(ranked) * self._quantile), len(ranked) // 2)
        if trial not in ranked[len(ranked) - share :]:
            return Member(self.member(trial).hparams, None)
        # Seeded by its place in the search, so that all processes that read the journal draw the same.
        draws = random.Random(f"{self._seed}/{trial}/{until}")
        source = draws.choice(ranked[:share])
        hparams = explored(self.member(source).hparams, self._mutations, draws, resampled=self._resampled)
        return Member(hparams, source)


def explored(
    hparams: Mapping[str, Any], space: Space, draws: random.Random, *, resampled: float = RESAMPLED
) -> dict[str, Any]:
    """Return a copy of the hyperparameters, in which those of `space` are changed.

    Numbers are multiplied by one of FACTORS, within their ranges; choices are replaced by a neighbouring value. With
    probability `resampled` a value is drawn from its range again instead.
    """
    changed = {
        name: explored(hparams[name], spec, draws, resampled=resampled)
        if is_nested(spec)
        else _step(hparams[name], spec, draws, resampled)
        for name, spec in sorted(space.items())
    }
    return {**deepcopy(dict(hparams)), **changed}


def _step(value: Any, spec: Any, draws: random.Random, resampled: float) -> Any:
    """Return the changed value of one hyperparameter."""
    if isinstance(spec, Mapping) and spec["type"] == DRAWN:
        return draws.choice(spec["vals"]) if draws.random() < resampled else value * draws.choice(FACTORS)
    kind = kind_of(spec)
    if kind == "const":
        return deepcopy(value)
    is_choice = kind == "categorical"
    if draws.random() < resampled or (is_choice and value not in spec["vals"]):
        return sample({"": spec}, draws)[""]
    if is_choice:
        place = spec["vals"].index(value) + draws.choice((-1, 1))
        return spec["vals"][min(max(place, 0), len(spec["vals"]) - 1)]
    low, high = (base_of(spec) ** end if kind == "log" else end for end in (spec["minval"], spec["maxval"]))
    near = min(max(value * draws.choice(FACTORS), low), high)
    return round(near) if kind == "int" else near
