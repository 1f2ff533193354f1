"""The share of a metric that each hyperparameter explains alone: the correlation ratio on ranks, without its bias.

Trials are ranked by the metric and grouped by the hyperparameter: a group for each value, or for each interval between
quantiles if there are many. The share of the ranks' variance between the groups is the correlation ratio. It is above 0
by chance, and more so with more groups. Epsilon squared removes that bias: T. L. Kelley, "An unbiased correlation ratio
measure", PNAS 21 (1935) 554-559. On ranks it is a form of Kruskal and Wallis' H (JASA 47 (1952) 583-621), whose
quantiles give the range of chance.

It detects effects of any shape of one hyperparameter, but not the joint effect of two.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

FEWEST_TRIALS = 20
"""Smallest number of trials; with fewer, chance alone reaches the values of a strong hyperparameter."""
MOST_GROUPS = 6
"""Largest number of groups into which the values of a number are divided."""
FEWEST_IN_GROUP = 5
"""Smallest mean number of trials in such a group."""
_NORMAL_95 = 1.6449
"""95% quantile of the normal distribution."""


@dataclass(frozen=True, kw_only=True)
class Importance:
    """The share of the metric that one hyperparameter explains."""

    name: str
    share: float
    """Share of the variance of the trials' ranks, from 0 to 1."""
    by_chance: float
    """Value that a hyperparameter without effect stays below in 19 of 20 searches."""
    groups: int
    """Number of groups of trials that were compared."""


def importances(points: Sequence[tuple[dict[str, Any], float | None]], names: Sequence[str]) -> list[Importance]:
    """Return the importances, largest first.

    `points`: hyperparameters and metric of each trial; smaller is better, and None ranks last. The result is empty with
    fewer than FEWEST_TRIALS trials, and lacks names whose values form only one group.
    """
    if len(points) < FEWEST_TRIALS:
        return []
    ranks = ranked([math.inf if value is None else value for _, value in points])
    found = [_importance(name, [hparams.get(name) for hparams, _ in points], ranks) for name in names]
    return sorted(filter(None, found), key=lambda importance: -importance.share)


def _importance(name: str, values: Sequence[Any], ranks: Sequence[float]) -> Importance | None:
    labels = grouped(values)
    count, groups = len(ranks), len(set(labels))
    total = _variation(ranks)
    if groups < 2 or groups == count or not total:
        return None
    within = sum(
        _variation([rank for rank, its in zip(ranks, labels, strict=True) if its == label]) for label in set(labels)
    )
    share = 1 - (within / (count - groups)) / (total / (count - 1))
    # epsilon squared on ranks is (H - groups + 1) / (count - groups); by chance, H is distributed as chi squared
    chance = (_chi_squared_95(groups - 1) - groups + 1) / (count - groups)
    return Importance(name=name, share=max(share, 0.0), by_chance=min(max(chance, 0.0), 1.0), groups=groups)


def ranked(values: Sequence[float]) -> list[float]:
    """Return the ranks, from 1; equal values share the mean of their ranks."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    first = 0
    while first < len(order):
        last = first
        while last + 1 < len(order) and values[order[last + 1]] == values[order[first]]:
            last += 1
        for place in order[first : last + 1]:
            ranks[place] = (first + last) / 2 + 1
        first = last + 1
    return ranks


def grouped(values: Sequence[Any]) -> list[Hashable]:
    """Return the label of each value's group.

    A group contains equal values or, if there are many different numbers, those of an interval between quantiles.
    """
    most = min(MOST_GROUPS, len(values) // FEWEST_IN_GROUP)
    if len({json.dumps(value, sort_keys=True) for value in values}) <= most or not all(map(_is_number, values)):
        return [json.dumps(value, sort_keys=True) for value in values]
    ranks = ranked(values)
    return [min(int((rank - 1) * most / len(values)), most - 1) for rank in ranks]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _variation(values: Sequence[float]) -> float:
    """Return the sum of squared deviations from the mean."""
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values)


def _chi_squared_95(freedom: int) -> float:
    """Return the 95% quantile of chi squared, by the approximation of Wilson and Hilferty, PNAS 17 (1931) 684-688."""
    spread = 2 / (9 * freedom)
    root = 1 - spread + _NORMAL_95 * math.sqrt(spread)
    return freedom * root * root * root
