from __future__ import annotations

from typing import Any

import pytest

from hpc_det.config.checks import space_problems

INT = {"type": "int", "minval": 1, "maxval": 9}
LOG = {"type": "log", "minval": -4, "maxval": -2}


def problems(searcher: str = "random", **spec: Any) -> list[str]:
    """Of a hyperparameter h in the map `optimizer`, as "key: what; remedy"."""
    found = list(space_problems({"optimizer": {"h": spec}}, searcher))
    assert all(path.startswith("hyperparameters.optimizer.h.") for path, _, _ in found)
    return [f"{path.rpartition('.')[2]}: {what}; {remedy}" for path, what, remedy in found]


@pytest.mark.parametrize("searcher", ["single", "random", "grid", "points", "async_halving", "adaptive_asha"])
def test_constants_are_right_for_every_searcher(searcher: str) -> None:
    space: dict[str, Any] = {
        "a": 1,
        "b": None,
        "c": [1, {"type": 3}],
        "d": {"e": {}},
        "f": {"type": "const", "val": {"x": 1}},
    }
    assert list(space_problems(space, searcher)) == []


@pytest.mark.parametrize("searcher", ["random", "grid", "async_halving", "adaptive_asha"])
def test_whole_ranges_are_right_for_every_searcher_that_searches(searcher: str) -> None:
    space = {
        "a": {**INT, "count": 3},
        "b": {"type": "double", "minval": -0.5, "maxval": 1, "count": 1},
        "c": {**LOG, "base": 2.5, "count": 3},
        "d": {**LOG, "count": 3},
        "e": {"type": "categorical", "vals": [None, {"x": 1}]},
    }
    assert list(space_problems({"nested": space, **space}, searcher)) == []


KINDS_AND_MORE = (
    "expected one of const, categorical, int, double, log; for a constant map that has a key `type`, give "
    "{type: const, val: {...}}"
)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"type": "gauss"}, [f"type: got 'gauss'; {KINDS_AND_MORE}"]),
        ({"type": None}, [f"type: got None; {KINDS_AND_MORE}"]),
        ({"type": ["int"]}, [f"type: got ['int']; {KINDS_AND_MORE}"]),
        ({"type": "const"}, ["val: required, but nobody set it; give the constant's value"]),
        ({"type": "const", "val": 1, "vals": [1]}, ["vals: unknown key 'vals'; did you mean 'val'?"]),
        ({"type": "categorical"}, ["vals: required, but nobody set it; give the list of values"]),
        ({"type": "categorical", "vals": []}, ["vals: got []; expected a list of at least one value"]),
        ({"type": "categorical", "vals": "abc"}, ["vals: got 'abc'; expected a list of at least one value"]),
        ({**INT, "minval": 9}, ["minval: 9 is not below maxval 9; swap them, or give `type: const` for one value"]),
        ({**INT, "minval": 1.0}, ["minval: got 1.0; expected a whole number of 64 bits"]),
        ({**INT, "maxval": True}, ["maxval: got True; expected a whole number of 64 bits"]),
        ({**INT, "maxval": 2**63}, ["maxval: got 9223372036854775808; expected a whole number of 64 bits"]),
        ({**INT, "count": 0}, ["count: got 0; expected a whole number >= 1"]),
        ({**INT, "step": 2}, ["step: unknown key 'step'; known: type, minval, maxval, count"]),
        ({"type": "double", "minval": "1e-4", "maxval": 1}, ["minval: got '1e-4'; expected a number"]),
        ({"type": "double", "minval": 0, "maxval": float("inf")}, ["maxval: got inf; expected a number"]),
        (
            {"type": "double", "minval": -1e308, "maxval": 1e308},
            ["maxval: 1e+308 - -1e+308 is no finite number; narrow the range"],
        ),
        ({**LOG, "base": 0}, ["base: got 0; expected a number above 0"]),
        ({**LOG, "base": "ten"}, ["base: got 'ten'; expected a number above 0"]),
        (
            {**LOG, "maxval": 1000},
            ["maxval: 10 ** -4 and 10 ** 1000 are not both finite; minval and maxval of a log are exponents"],
        ),
        (
            {"type": "int", "minvall": 3},
            [
                "minval: required, but nobody set it; give the lowest value, or of a log its exponent",
                "maxval: required, but nobody set it; give the highest value, or of a log its exponent",
                "minvall: unknown key 'minvall'; did you mean 'minval'?",
            ],
        ),
    ],
)
def test_every_problem_of_a_hyperparameter(spec: dict[str, Any], expected: list[str]) -> None:
    assert problems(**spec) == expected


@pytest.mark.parametrize("kind", ["int", "double", "log"])
def test_a_grid_needs_counts(kind: str) -> None:
    spec: dict[str, Any] = {"type": kind, "minval": 1, "maxval": 2}
    assert problems(**spec) == []
    assert problems("grid", **spec) == [
        f"count: a count was not provided, and the grid searcher needs one for {kind}; give the number of points"
    ]


def test_a_range_where_only_constants_make_sense() -> None:
    assert problems("points", **LOG) == [
        "type: 'log' is a range to search, and the points searcher needs constants; give `type: const` and `val`"
    ]


def test_problems_of_all_hyperparameters_come_at_once() -> None:
    space = {"a": {"b": {"type": "int"}}, "c": {"type": "x"}}
    assert [path for path, _, _ in space_problems(space, "random")] == [
        "hyperparameters.a.b.minval",
        "hyperparameters.a.b.maxval",
        "hyperparameters.c.type",
    ]


@pytest.mark.parametrize("space", [None, 3, [1], {1: {"type": "int"}}])
def test_what_is_no_space_does_not_break_the_check(space: Any) -> None:
    list(space_problems(space, "grid"))
