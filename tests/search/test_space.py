from __future__ import annotations

from typing import Any

import pytest

from hpc_det.config.checks import space_problems
from tests.facts import each_names, golden, keys

INT = {"type": "int", "minval": 1, "maxval": 9}
LOG = {"type": "log", "minval": -4, "maxval": -2}


def problems(searcher: str = "random", **spec: Any) -> list[str]:
    """Return the problems of the hyperparameter `optimizer.h`, each as "key: problem; remedy"."""
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


KINDS = ["const", "categorical", "int", "double", "log", "{type: const, val: {...}}"]
WRONG: list[tuple[dict[str, Any], list[list[object]]]] = [
    ({"type": "gauss"}, [["type", "'gauss'", *KINDS]]),
    ({"type": None}, [["type", None, *KINDS]]),
    ({"type": ["int"]}, [["type", ["int"], *KINDS]]),
    ({"type": "const"}, [["val"]]),
    ({"type": "const", "val": 1, "vals": [1]}, [["vals", "'vals'", "'val'"]]),
    ({"type": "categorical"}, [["vals"]]),
    ({"type": "categorical", "vals": []}, [["vals", "[]"]]),
    ({"type": "categorical", "vals": "abc"}, [["vals", "'abc'"]]),
    ({**INT, "minval": 9}, [["minval", 9, "maxval 9", "type: const"]]),
    ({**INT, "minval": 1.0}, [["minval", 1.0, 64]]),
    ({**INT, "maxval": True}, [["maxval", True, 64]]),
    ({**INT, "maxval": 2**63}, [["maxval", 9223372036854775808, 64]]),
    ({**INT, "count": 0}, [["count", 0, 1]]),
    ({**INT, "step": 2}, [["step", "'step'", "type", "minval", "maxval", "count"]]),
    ({"type": "double", "minval": "1e-4", "maxval": 1}, [["minval", "'1e-4'"]]),
    ({"type": "double", "minval": 0, "maxval": float("inf")}, [["maxval", "inf"]]),
    ({"type": "double", "minval": -1e308, "maxval": 1e308}, [["maxval", "1e+308", "-1e+308"]]),
    ({**LOG, "base": 0}, [["base", 0]]),
    ({**LOG, "base": "ten"}, [["base", "'ten'"]]),
    ({**LOG, "maxval": 1000}, [["maxval", "10 ** -4", "10 ** 1000", "minval"]]),
    ({"type": "int", "minvall": 3}, [["minval"], ["maxval"], ["minvall", "'minvall'", "'minval'"]]),
]


@pytest.mark.parametrize(("spec", "facts"), WRONG)
def test_every_problem_of_a_hyperparameter(spec: dict[str, Any], facts: list[list[object]]) -> None:
    assert keys(problems(**spec)) == [key for key, *_ in facts]
    each_names(problems(**spec), *facts)


def test_the_words_for_a_wrong_hyperparameter() -> None:
    assert [line for spec, _ in WRONG for line in problems(**spec)] == golden(__file__, "space.txt")


@pytest.mark.parametrize("kind", ["int", "double", "log"])
def test_a_grid_needs_counts(kind: str) -> None:
    spec: dict[str, Any] = {"type": kind, "minval": 1, "maxval": 2}
    assert problems(**spec) == []
    each_names(problems("grid", **spec), ["count", "grid", kind])


def test_a_range_where_only_constants_make_sense() -> None:
    each_names(problems("points", **LOG), ["type", "'log'", "points", "type: const", "val"])


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
