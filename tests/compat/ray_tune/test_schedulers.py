"""Ray's schedulers as searchers of tune_run."""

from __future__ import annotations

import random
from typing import Any

import pytest

from hpc_det.compat.ray_tune import choice, sample_from, uniform
from hpc_det.compat.ray_tune.error import TuneError
from hpc_det.compat.ray_tune.schedulers import (
    ASHAScheduler,
    FIFOScheduler,
    PopulationBasedTraining,
    create_scheduler,
)
from hpc_det.errors import UsageError
from hpc_det.search.asha import rung_lengths
from hpc_det.sgd.tune.draws import Drawn
from tests.facts import refused

PBT: dict[str, Any] = {"time_attr": "training_iteration", "perturbation_interval": 2}


@pytest.mark.parametrize(
    ("max_t", "grace_period", "factor", "rungs"),
    # the last rung is the end of the trial; Ray has rungs at grace_period x factor^k below it
    [(64, 1, 4, [1, 4, 16, 64]), (16, 4, 2, [4, 8, 16]), (100, 1, 4, [1, 6, 25, 100]), (5, 5, 3, [5])],
)
def test_halving_has_rungs_from_the_grace_period_to_the_end(
    max_t: int, grace_period: int, factor: int, rungs: list[int]
) -> None:
    scheduler = ASHAScheduler(max_t=max_t, grace_period=grace_period, reduction_factor=factor)
    found = scheduler.searcher(max_t)
    assert (found["name"], found["stop_once"]) == ("async_halving", True)
    assert list(rung_lengths(found["num_rungs"], found["divisor"], max_t)) == rungs


def test_halving_counts_iterations_and_has_one_bracket() -> None:
    with refused(UsageError, "'time_total_s'", "'training_iteration'"):
        ASHAScheduler(time_attr="time_total_s")
    with refused(UsageError, "brackets=3", "adaptive_asha"):
        ASHAScheduler(brackets=3)
    with refused(UsageError, "grace_period", "9", "max_t", "3"):
        ASHAScheduler(max_t=3, grace_period=9)


def test_a_population_changes_lists_ranges_and_functions() -> None:
    mutations: dict[str, Any] = {"lr": random.random, "momentum": [0.8, 0.9], "decay": uniform(0, 1)}
    found = PopulationBasedTraining(**PBT, hyperparam_mutations=mutations, resample_probability=0.5).searcher(9)
    assert (found["name"], found["interval"], found["resampled"]) == ("population", 2, 0.5)
    assert found["mutations"] == mutations


def test_numbers_of_a_choice_are_drawn_or_multiplied_as_by_ray() -> None:
    mutations = {"net": {"width": choice([8, 16]), "act": choice(["relu", "elu"])}}
    found = PopulationBasedTraining(**PBT, hyperparam_mutations=mutations).searcher(9)["mutations"]["net"]
    assert found["width"].function() in (8, 16)
    assert found["act"] == choice(["relu", "elu"])


def test_a_trial_starts_with_a_draw_of_a_mutation_that_the_config_lacks() -> None:
    mutations = {"lr": random.random, "momentum": [0.8, 0.9], "net": {"width": uniform(1, 2)}, "decay": [1, 2]}
    scheduler = PopulationBasedTraining(**PBT, hyperparam_mutations=mutations)
    whole = scheduler.completed({"decay": 1, "net": {"depth": 3}})
    assert isinstance(whole.pop("lr"), Drawn)
    assert whole == {"decay": 1, "momentum": choice([0.8, 0.9]), "net": {"depth": 3, "width": uniform(1, 2)}}


@pytest.mark.parametrize(
    ("arguments", "kind", "facts"),
    [
        ({}, TuneError, ["hyperparam_mutations"]),
        ({"hyperparam_mutations": {"a": [1]}}, UsageError, ["'time_total_s'", "'training_iteration'"]),
        ({**PBT, "hyperparam_mutations": {"a": [1]}, "synch": True}, UsageError, ["synch", "True", "False"]),
        ({**PBT, "hyperparam_mutations": {"a": [1]}, "burn_in_period": 3}, UsageError, ["burn_in_period", "3", "0"]),
        ({**PBT, "hyperparam_mutations": {"a": [1]}, "quantile_fraction": 0}, UsageError, ["quantile", "0"]),
        ({**PBT, "custom_explore_fn": dict}, UsageError, ["custom_explore_fn", "hyperparam_mutations"]),
        (
            {"time_attr": "training_iteration", "perturbation_interval": 1.5, "hyperparam_mutations": {"a": [1]}},
            UsageError,
            ["perturbation_interval", "1.5"],
        ),
    ],
)
def test_what_would_change_a_population_is_refused(
    arguments: dict[str, Any], kind: type[Exception], facts: list[str]
) -> None:
    with refused(kind, *facts):
        PopulationBasedTraining(**arguments)


def test_schedulers_by_their_names() -> None:
    assert type(create_scheduler("fifo")) is FIFOScheduler
    assert create_scheduler("async_hyperband", max_t=7).max_t == 7
    assert type(create_scheduler("PBT", **PBT, hyperparam_mutations={"a": [1]})) is PopulationBasedTraining
    with refused(ValueError, "'hyperband'", "'fifo'", "'pbt'"):
        create_scheduler("hyperband")


def test_a_function_that_was_given_as_sample_from_stays_one() -> None:
    drawn = sample_from(random.random)
    scheduler = PopulationBasedTraining(**PBT, hyperparam_mutations={"lr": drawn})
    assert scheduler.completed({}) == {"lr": drawn}
