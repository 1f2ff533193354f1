"""Decisions and numbers of searches, as Determined's tests of its search methods have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hpc_det.search.adaptive import bracket_rungs, bracket_trials, concurrency_shares
from hpc_det.search.asha import rung_lengths
from hpc_det.search.sample import GridSampler, SpaceSampler
from tests.conformance.row import Row

SEARCHER = "master/pkg/searcher"


@dataclass(frozen=True, kw_only=True)
class Number(Row):
    """A result that is computed without a search."""

    found: Callable[[], Any]
    expected: Any


@dataclass(frozen=True, kw_only=True)
class Search(Row):
    """A whole search in which each trial reports one value at all its lengths."""

    searcher: dict[str, Any]
    values: Sequence[float]
    """What each trial reports, by its number less one."""
    lengths: Sequence[Sequence[int]]
    """The lengths to which each trial is trained."""
    stopped: dict[int, int] = field(default_factory=dict)
    """By its number, a trial that stops itself, and the length at which it does."""


def _brackets() -> list[Number]:
    file = f"{SEARCHER}/adaptive_asha_test.go"
    trials = [
        (20, 3.0, [3, 2, 1], [12, 5, 3]),
        (50, 3.0, [4, 3], [35, 15]),
        (50, 4.0, [3, 2], [37, 13]),
        (100, 4.0, [4, 3, 2], [70, 22, 8]),
    ]
    shares = [
        (0, 3.0, [9, 3, 1], [3, 3, 3]),
        (11, 3.0, [9, 3, 1], [4, 4, 3]),
        (0, 4.0, [40, 10], [10, 10]),
    ]
    modes = [("conservative", [1, 2, 3, 4, 5]), ("standard", [3, 4, 5]), ("aggressive", [5])]
    return [
        *(
            Number(
                case=f"{total} trials in brackets of {rungs} rungs with divisor {divisor:g}",
                follows=file,
                found=partial(bracket_trials, total, divisor, rungs),
                expected=expected,
            )
            for total, divisor, rungs, expected in trials
        ),
        *(
            Number(
                case=f"places for brackets of {counts} trials with divisor {divisor:g} and a limit of {limit}",
                follows=file,
                found=partial(concurrency_shares, limit, divisor, counts),
                expected=expected,
            )
            for limit, divisor, counts, expected in shares
        ),
        *(
            Number(
                case=f"brackets of the mode {mode} with at most 5 rungs",
                follows=f"{SEARCHER}/adaptive_asha.go",
                found=partial(bracket_rungs, mode, 5),
                expected=expected,
            )
            for mode, expected in modes
        ),
    ]


def _rungs() -> list[Number]:
    file = f"{SEARCHER}/asha_stopping_test.go"
    return [
        Number(
            case=f"lengths of {count} rungs up to {longest} with divisor {divisor:g}",
            follows=file,
            found=partial(rung_lengths, count, divisor, longest),
            expected=expected,
        )
        for count, divisor, longest, expected in (
            (3, 3.0, 9, [1, 3, 9]),
            (4, 2.0, 10, [1, 2, 5, 10]),
            (1, 3.0, 9, [9]),
            (3, 3.0, 900, [100, 300, 900]),
        )
    ]


def _axis(**spec: Any) -> Callable[[], list[Any]]:
    def points() -> list[Any]:
        grid = GridSampler({"x": spec}, 0)
        return [grid.sample(trial).hparams["x"] for trial in range(1, grid.points + 1)]

    return points


def _points(space: dict[str, Any]) -> Callable[[], list[Any]]:
    def points() -> list[Any]:
        grid = GridSampler(space, 0)
        return [grid.sample(trial).hparams for trial in range(1, grid.points + 1)]

    return points


def _grids() -> list[Number]:
    file = f"{SEARCHER}/grid_test.go"
    whole = {"type": "int", "minval": 0, "maxval": 20, "count": 3}
    half = {"type": "int", "minval": 0, "maxval": 10, "count": 3}
    axes: list[tuple[str, dict[str, Any], list[Any]]] = [
        ("5 whole numbers from 0 to 4", {"type": "int", "minval": 0, "maxval": 4, "count": 5}, [0, 1, 2, 3, 4]),
        ("3 whole numbers from -4 to -2", {"type": "int", "minval": -4, "maxval": -2, "count": 3}, [-4, -3, -2]),
        ("4 whole numbers from -4 to 6", {"type": "int", "minval": -4, "maxval": 6, "count": 4}, [-4, -1, 3, 6]),
        ("5 real numbers from 0 to 2", {"type": "double", "minval": 0, "maxval": 2, "count": 5}, [0, 0.5, 1, 1.5, 2]),
        ("2 powers of ten", {"type": "log", "base": 10, "minval": -3, "maxval": -2, "count": 2}, [0.001, 0.01]),
        ("choices", {"type": "categorical", "vals": [1, 2, 3]}, [1, 2, 3]),
        ("a constant", {"type": "const", "val": 3}, [3]),
    ]
    order = "the first point is the first trial; Determined began with the last one"
    return [
        *(
            Number(case=f"a grid over {case}", follows=file, found=_axis(**spec), expected=expected)
            for case, spec, expected in axes
        ),
        Number(
            case="a grid over two axes",
            follows=file,
            differs=order,
            found=_points({"a": whole, "b": half}),
            expected=[{"a": a, "b": b} for a in (0, 10, 20) for b in (0, 5, 10)],
        ),
        Number(
            case="a grid over an axis and one in a map",
            follows=file,
            differs=order,
            found=_points({"a": whole, "b": {"c": half}}),
            expected=[{"a": a, "b": {"c": c}} for a in (0, 10, 20) for c in (0, 5, 10)],
        ),
    ]


def _samples() -> list[Number]:
    space = {
        "global_batch_size": {"type": "const", "val": 64},
        "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -2},
        "n": {"type": "int", "minval": 8, "maxval": 64},
        "opt": {"type": "categorical", "vals": ["a", "b", "c"]},
    }

    def drawn(trial: int) -> dict[str, Any]:
        sample = SpaceSampler(space, 777).sample(trial)
        return {**sample.hparams, "lr": float(f"{sample.hparams['lr']:.6e}"), "seed": sample.seed}

    return [
        Number(
            case=f"trial {trial} of a random search with seed 777",
            follows=f"{SEARCHER}/hyperparameters.go",
            found=partial(drawn, trial),
            expected={"global_batch_size": 64, "lr": lr, "n": n, "opt": opt, "seed": seed},
        )
        for trial, lr, n, opt, seed in (
            (1, 2.019889e-4, 46, "b", 1833938343),
            (2, 1.672618e-3, 32, "c", 1664641345),
            (3, 1.44335e-4, 13, "b", 1688066898),
        )
    ]


def _halvings() -> list[Search]:
    file = f"{SEARCHER}/asha_test.go"
    twelve = {
        "name": "async_halving",
        "smaller_is_better": True,
        "max_length": {"batches": 9000},
        "num_rungs": 3,
        "divisor": 3,
        "max_trials": 12,
        "stop_once": False,
    }
    rising = [number / 100 for number in range(1, 13)]
    best = [[1000, 3000, 9000], [1000, 3000], [1000, 3000], [1000, 3000], *[[1000]] * 8]
    single = {**twelve, "num_rungs": 1, "max_trials": 4}
    return [
        Search(
            case="halving of 12 trials, of which the first is the best",
            follows=file,
            searcher=twelve,
            values=rising,
            lengths=best,
        ),
        Search(
            case="halving of 12 trials, of which one stops itself at its second length",
            follows=file,
            searcher=twelve,
            values=rising,
            lengths=best,
            stopped={3: 3000},
        ),
        Search(
            case="halving where greater is better",
            follows=file,
            searcher={**twelve, "smaller_is_better": False},
            values=rising[::-1],
            lengths=best,
        ),
        Search(
            case="halving whose best trials come last",
            follows=file,
            searcher=twelve,
            values=[0.10, 0.11, 0.12, *rising[:9]],
            lengths=[
                [1000, 3000],
                [1000],
                [1000],
                [1000, 3000, 9000],
                [1000, 3000],
                [1000, 3000],
                [1000, 3000],
                *[[1000]] * 5,
            ],
            stopped={3: 1000},
        ),
        Search(
            case="halving with a single rung",
            follows=file,
            searcher=single,
            values=[0.05, 0.06, 0.07, 0.08],
            lengths=[[9000]] * 4,
        ),
    ]


def _adaptives() -> list[Search]:
    file = f"{SEARCHER}/adaptive_asha_test.go"
    five = {
        "name": "adaptive_asha",
        "smaller_is_better": True,
        "max_length": {"batches": 900},
        "max_trials": 5,
        "mode": "standard",
        "max_rungs": 2,
        "divisor": 3,
        "bracket_rungs": [],
        "stop_once": False,
    }
    rising = [0.1, 0.2, 0.3, 0.4, 0.5]
    first = [[300, 900], [300], [300], [900], [900]]
    return [
        Search(case="two brackets", follows=file, searcher=five, values=rising, lengths=first),
        Search(
            case="two brackets and a trial that stops itself",
            follows=file,
            searcher=five,
            values=rising,
            lengths=first,
            stopped={2: 300},
        ),
        Search(
            case="two brackets where greater is better",
            follows=file,
            searcher={**five, "smaller_is_better": False},
            values=rising[::-1],
            lengths=first,
        ),
        Search(
            case="two brackets that stop trials instead of promoting them",
            follows=file,
            searcher={**five, "stop_once": True},
            values=rising,
            lengths=first,
        ),
        Search(
            case="two brackets that stop trials where greater is better and each trial is the best so far",
            follows=file,
            searcher={**five, "stop_once": True, "smaller_is_better": False},
            values=rising,
            lengths=[[300, 900], [300, 900], [300, 900], [900], [900]],
        ),
    ]


NUMBERS = [*_brackets(), *_rungs(), *_grids(), *_samples()]
SEARCHES = [*_halvings(), *_adaptives()]
ROWS: list[Row] = [*NUMBERS, *SEARCHES]
