"""The jobs of an experiment: their number, their size, and how many run at the same time."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_det.config.cluster import Cluster
from hpc_det.config.schema import Experiment
from hpc_det.errors import UsageError
from hpc_det.plan.job_plan import JobArray
from hpc_det.plan.planner import Placement, RankLayout, placement, rank_layout
from tests.facts import refused, unnamed


def cluster(max_nodes: int | None = None) -> Cluster:
    return Cluster(name="atlas", scheduler="slurm", slots_per_node=4, slot_type="gpu", max_nodes=max_nodes)


@pytest.mark.parametrize(
    ("slots", "nodes", "ranks_per_node"),
    [(1, 1, 1), (2, 1, 2), (3, 1, 3), (4, 1, 4), (8, 2, 4), (12, 3, 4), (4000, 1000, 4)],
)
def test_any_number_fits_a_node_and_whole_nodes_fit_beyond(slots: int, nodes: int, ranks_per_node: int) -> None:
    assert rank_layout(slots, cluster()) == RankLayout(nodes=nodes, ranks_per_node=ranks_per_node)


@pytest.mark.parametrize(("slots", "low", "high"), [(5, 4, 8), (7, 4, 8), (9, 8, 12), (4001, 4000, 4004)])
def test_part_of_a_node_is_an_error_that_names_what_would_fit(slots: int, low: int, high: int) -> None:
    with pytest.raises(UsageError) as error:
        rank_layout(slots, cluster())
    assert not unnamed(str(error.value), "resources.slots_per_trial", slots, 4, "'atlas'", low, high)


@pytest.mark.parametrize("slots", [9, 10, 12])
def test_more_than_the_cluster_has_is_an_error_that_names_the_most(slots: int) -> None:
    with pytest.raises(UsageError) as error:
        rank_layout(slots, cluster(max_nodes=2))
    assert not unnamed(str(error.value), "resources.slots_per_trial", slots, "'atlas'", 2, 4, 8)


@pytest.mark.parametrize("slots", [1, 4, 8])
def test_all_of_the_cluster_may_be_asked_for(slots: int) -> None:
    shape = rank_layout(slots, cluster(max_nodes=2))
    assert shape.nodes * shape.ranks_per_node == slots


def test_no_advice_exceeds_the_cluster() -> None:
    with refused(UsageError, "resources.slots_per_trial", 7, 4, 8):
        rank_layout(7, cluster(max_nodes=2))
    with refused(UsageError, "resources.slots_per_trial", 5, 4):
        rank_layout(5, cluster(max_nodes=1))


RANDOM = {"name": "random", "metric": "loss", "max_length": {"batches": 10}}


def placed(
    trials: int,
    *,
    resources: dict[str, Any] | None = None,
    searcher: dict[str, Any] | None = None,
    first: int = 0,
    **site: Any,
) -> Placement:
    cluster = {"name": "atlas", "scheduler": "slurm", "slots_per_node": 4, "slot_type": "gpu"}
    settings: dict[str, Any] = {
        "name": "digits",
        "entrypoint": "model_def:DigitsTrial",
        "searcher": {**RANDOM, "max_trials": trials, **(searcher or {})},
        "resources": {"slots_per_trial": 1, **(resources or {})},
    }
    return placement(Experiment(**settings), Cluster(**{**cluster, **site}), trials, first)


def test_a_single_trial_is_one_job_of_its_gangs_size() -> None:
    found = placed(1, resources={"slots_per_trial": 8})
    assert found.gang == found.job == RankLayout(nodes=2, ranks_per_node=4)
    assert found.arrays == (JobArray(first=0, count=1),)
    assert found.workers == 1


def test_each_trial_has_a_job_and_as_many_run_as_may_train_at_the_same_time() -> None:
    found = placed(64, searcher={"max_concurrent_trials": 16})
    assert found.arrays == (JobArray(first=0, count=64, at_once=16),)
    assert found.job == found.gang == RankLayout(nodes=1, ranks_per_node=1)


@pytest.mark.parametrize("limit", [0, 64, 100])
def test_where_all_trials_may_train_at_once_the_scheduler_alone_decides(limit: int) -> None:
    assert placed(64, searcher={"max_concurrent_trials": limit}).arrays == (JobArray(first=0, count=64),)


@pytest.mark.parametrize(("max_slots", "at_once"), [(8, 4), (9, 4), (1, 1)])
def test_the_slots_of_an_experiment_limit_how_many_gangs_train_at_once(max_slots: int, at_once: int) -> None:
    resources = {"slots_per_trial": 2, "max_slots": max_slots}
    (array,) = placed(64, resources=resources, searcher={"max_concurrent_trials": 16}).arrays
    assert array.at_once == at_once


def test_arrays_are_as_long_as_the_cluster_allows_and_workers_count_through() -> None:
    found = placed(25, searcher={"max_concurrent_trials": 4}, max_array_size=10, first=100)
    assert found.arrays == (
        JobArray(first=100, count=10, at_once=4),
        JobArray(first=110, count=10, at_once=4),
        JobArray(first=120, count=5, at_once=4),
    )
    assert found.workers == 25


def test_packed_slots_are_one_allocation_that_whole_gangs_share() -> None:
    found = placed(64, resources={"slots_per_trial": 2, "packed_slots": 8}, searcher={"max_concurrent_trials": 16})
    assert found.gang == RankLayout(nodes=1, ranks_per_node=2)
    assert found.job == RankLayout(nodes=2, ranks_per_node=4)
    assert found.arrays == (JobArray(first=0, count=1, workers_each=4),)
    assert found.workers == 4


def test_no_more_gangs_share_an_allocation_than_may_train_at_once() -> None:
    resources = {"slots_per_trial": 1, "packed_slots": 8}
    (array,) = placed(64, resources=resources, searcher={"max_concurrent_trials": 3}).arrays
    assert array.workers_each == 3
    assert placed(2, resources=resources).arrays[0].workers_each == 2


def test_packed_slots_for_one_gang_are_a_plain_job() -> None:
    found = placed(64, resources={"slots_per_trial": 4, "packed_slots": 4})
    assert found.job == found.gang
    assert found.arrays == (JobArray(first=0, count=1, workers_each=1),)


def test_an_allocation_that_fits_in_no_way_is_refused() -> None:
    with refused(UsageError, "resources.packed_slots", 6, 4, 8):
        placed(64, resources={"slots_per_trial": 1, "packed_slots": 6}, searcher={"max_concurrent_trials": 16})


def test_without_a_queue_all_gangs_that_fit_share_this_machine() -> None:
    found = placed(64, resources={"slots_per_trial": 2}, scheduler="local", slots_per_node=8, max_nodes=1)
    assert found.job == RankLayout(nodes=1, ranks_per_node=8)
    assert found.arrays == (JobArray(first=0, count=1, workers_each=4),)


def test_a_single_trial_without_a_queue_takes_what_it_needs() -> None:
    found = placed(1, resources={"slots_per_trial": 2}, scheduler="local", slots_per_node=8, max_nodes=1)
    assert found.job == found.gang == RankLayout(nodes=1, ranks_per_node=2)
    assert found.arrays == (JobArray(first=0, count=1, workers_each=1),)


def test_a_gang_that_this_machine_cannot_hold_is_refused() -> None:
    with refused(UsageError, "resources.slots_per_trial", 9, "'atlas'", 8):
        placed(1, resources={"slots_per_trial": 9}, scheduler="local", slots_per_node=8, max_nodes=1)
