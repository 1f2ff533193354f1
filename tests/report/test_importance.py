from __future__ import annotations

import random
import statistics
from typing import Any

import pytest

from hpc_det.report.importance import FEWEST_TRIALS, grouped, importances, ranked

Points = list[tuple[dict[str, Any], float | None]]


def drawn(trials: int, seed: int = 1) -> list[dict[str, Any]]:
    draws = random.Random(seed)
    return [
        {"lr": draws.random(), "noise": draws.random(), "optimizer": draws.choice(["adam", "sgd"])}
        for _ in range(trials)
    ]


def shares(points: Points) -> dict[str, float]:
    return {found.name: found.share for found in importances(points, list(points[0][0]))}


def test_what_decides_alone_explains_nearly_all_whatever_the_shape_of_its_effect() -> None:
    points: Points = [(hparams, (hparams["lr"] - 0.5) ** 2) for hparams in drawn(200)]
    found = importances(points, ["noise", "lr", "optimizer"])
    assert found[0].name == "lr"
    assert found[0].share > 0.8
    assert all(other.share < other.by_chance for other in found[1:])


def test_a_choice_counts_as_well_as_a_number() -> None:
    points: Points = [(hparams, float(hparams["optimizer"] == "sgd")) for hparams in drawn(60)]
    assert shares(points)["optimizer"] == pytest.approx(1)


def test_the_bias_is_removed_and_five_percent_of_chance_results_exceed_the_mark() -> None:
    found = []
    for seed in range(300):
        draws = random.Random(f"metric {seed}")
        points: Points = [(hparams, draws.random()) for hparams in drawn(40, seed)]
        found += importances(points, ["noise"])
    assert statistics.mean(its.share > its.by_chance for its in found) == pytest.approx(0.05, abs=0.03)
    assert statistics.median(its.share for its in found) < 0.02


def test_a_failed_trial_is_the_worst() -> None:
    points: Points = [(hparams, None if hparams["lr"] > 0.5 else 0.1) for hparams in drawn(40)]
    assert shares(points)["lr"] > 0.6


def test_nothing_is_said_of_few_trials_and_of_what_is_always_the_same() -> None:
    points: Points = [(hparams, hparams["lr"]) for hparams in drawn(FEWEST_TRIALS)]
    assert importances(points[:-1], ["lr"]) == []
    assert [its.name for its in importances([({**p, "width": 7}, v) for p, v in points], ["lr", "width"])] == ["lr"]


def test_equal_values_share_a_rank() -> None:
    assert ranked([3, 1, 3, 2]) == [3.5, 1, 3.5, 2]


def test_numbers_are_cut_at_quantiles_and_few_values_are_groups_themselves() -> None:
    assert grouped([float(i) for i in range(10)]) == [0, 0, 0, 0, 0, 1, 1, 1, 1, 1]
    assert len(set(grouped([16, 32] * 10))) == 2
    assert len(set(grouped([[1], [2], None, "x"] * 5))) == 4
