from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_det.search.by_name import search_of
from hpc_det.search.method import Exit, Work
from hpc_det.search.population import Population, explored
from hpc_det.search.simulate import at_random, simulate

SPACE = {
    "batch": {"type": "int", "minval": 1, "maxval": 8},
    "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1},
    "net": {"act": {"type": "categorical", "vals": ["relu", "tanh", "elu"]}},
    "seed": 3,
}


def population(trials: int = 4, interval: int = 2, length: int = 6, quantile: float = 0.25) -> Population:
    searcher = {"name": "population", "max_trials": trials, "max_length": {"epochs": length}}
    searcher |= {"interval": interval, "quantile": quantile, "smaller_is_better": True}
    config: dict[str, Any] = {"searcher": searcher, "hyperparameters": SPACE}
    method, _ = search_of({**config, "reproducibility": {"experiment_seed": 1}}, [], None)
    assert isinstance(method, Population)
    return method


def train(method: Population, value: float) -> Work:
    work = method.next_work()
    assert work
    method.start(work)
    method.report(work.trial, value)
    return work


def test_all_begin_before_any_goes_on_and_nobody_is_left_behind() -> None:
    method = population(trials=3, interval=2, length=3)
    trained = [train(method, value=1.0) for _ in range(6)]
    assert trained == [Work(1, 2), Work(2, 2), Work(3, 2), Work(1, 3), Work(2, 3), Work(3, 3)]
    assert method.finished
    assert method.next_work() is None


def test_the_worst_goes_on_with_the_best_ones_checkpoint_a_step_from_its_hyperparameters() -> None:
    method = population()
    before = [method.member(trial).hparams for trial in (1, 2, 3, 4)]
    for value in (0.4, 0.3, 0.2, 0.9):
        train(method, value)
    hparams, source = method.member(4)
    assert source == 3
    assert hparams["seed"] == 3
    assert hparams != before[2]
    assert hparams != before[3]
    assert [method.member(trial) for trial in (1, 2, 3)] == [(own, None) for own in before[:3]]


def test_it_goes_on_with_its_own_at_the_next_report_that_is_good() -> None:
    method = population()
    for value in (0.4, 0.3, 0.2, 0.9, 0.3, 0.2, 0.1):
        train(method, value)
    taken_over = method.member(4).hparams
    train(method, 0.05)
    assert method.member(4) == (taken_over, None)


def test_who_ended_is_no_example() -> None:
    method = population(trials=2, quantile=0.5)
    train(method, 0.1)
    method.end(1, Exit.FAILED)
    train(method, 0.9)
    assert method.member(2).source is None
    assert method.is_closed(1)


def test_nan_is_the_worst() -> None:
    method = population(trials=2, quantile=0.5)
    train(method, 5.0)
    train(method, float("nan"))
    assert method.member(2).source == 1


def test_work_that_is_given_back_is_named_again() -> None:
    method = population(trials=1)
    work = method.next_work()
    assert work
    method.start(work)
    assert method.next_work() is None
    method.give_back(1)
    assert method.next_work() == work


@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 9), st.integers(1, 5))
def test_every_trial_comes_to_its_end(trials: int, interval: int, length: int, workers: int) -> None:
    method = population(trials, interval, length, quantile=0.5)
    played = simulate(method, at_random(), workers=workers)
    assert played.reached == dict.fromkeys(range(1, trials + 1), length)
    assert method.progress == 1


@given(st.integers())
def test_a_step_stays_in_the_space(seed: int) -> None:
    hparams: dict[str, Any] = {"batch": 8, "lr": 0.1, "net": {"act": "relu"}, "seed": 3}
    stepped = explored(hparams, SPACE, random.Random(seed))
    assert 1 <= stepped["batch"] <= 8
    assert isinstance(stepped["batch"], int)
    assert 0.99e-4 <= stepped["lr"] <= 0.1
    assert stepped["net"]["act"] in ("relu", "tanh", "elu")
    assert stepped["seed"] == 3


MUTATIONS: dict[str, Any] = {
    "lr": {"type": "drawn", "vals": [5.0, 7.0]},
    "act": {"type": "categorical", "vals": ["relu", "elu"]},
}


@given(st.integers())
def test_only_mutations_change(seed: int) -> None:
    hparams: dict[str, Any] = {"lr": 1.0, "act": "tanh", "batch": 8, "net": {"width": 2}}
    stepped = explored(hparams, MUTATIONS, random.Random(seed))
    assert stepped["lr"] in (0.8, 1.2, 5.0, 7.0)
    assert stepped["act"] in ("relu", "elu"), "a value that is not among the choices is drawn again"
    assert (stepped["batch"], stepped["net"]) == (8, {"width": 2})


@pytest.mark.parametrize(("resampled", "possible"), [(0.0, {0.8, 1.2}), (1.0, {5.0, 7.0})])
def test_the_probability_of_drawing_again_is_the_users(resampled: float, possible: set[float]) -> None:
    steps = [explored({"lr": 1.0}, {"lr": MUTATIONS["lr"]}, random.Random(i), resampled=resampled) for i in range(50)]
    assert {step["lr"] for step in steps} == possible


def test_a_population_changes_what_its_searcher_names() -> None:
    searcher = {"name": "population", "max_trials": 2, "max_length": {"epochs": 4}, "interval": 1, "quantile": 0.5}
    searcher |= {"smaller_is_better": True, "mutations": {"lr": MUTATIONS["lr"]}, "resampled": 1.0}
    config: dict[str, Any] = {"searcher": searcher, "hyperparameters": {"lr": 1.0, "seed": 3}}
    method, _ = search_of({**config, "reproducibility": {"experiment_seed": 1}}, [], None)
    assert isinstance(method, Population)
    train(method, 0.1)
    train(method, 0.9)
    (hparams, source) = method.member(2)
    assert source == 1
    assert hparams["lr"] in (5.0, 7.0)
    assert hparams["seed"] == 3
