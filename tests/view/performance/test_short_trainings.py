from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from hpc_det.config.cluster import Cluster
from hpc_det.config.job_sections import Environment
from hpc_det.config.rank_variables import NO_WHOLE_BATCH
from hpc_det.errors import UsageError
from hpc_det.view.performance.short_trainings import (
    MOST_DOUBLINGS,
    Aim,
    Throughput,
    larger_batch,
    slot_counts,
    variations,
)
from tests.facts import refused, unnamed
from tests.view.performance.measurements import (
    BASELINE,
    FIRST_BATCH,
    OUT_OF_MEMORY,
    RARE,
    batches_of,
    failed,
    measured,
    on,
)

TREE: dict[str, Any] = {
    "name": "digits",
    "labels": ["baseline"],
    "notify": [{"command": ["mail"]}],
    "searcher": {"name": "random", "metric": "accuracy", "smaller_is_better": False, "max_trials": 8},
    "scheduling_unit": 7,
    "max_restarts": 5,
    "resources": {"slots_per_trial": 4, "max_slots": 8, "packed_slots": 8, "resource_pool": "gpu"},
    "optimizations": {"aggregation_frequency": 1, "gradient_compression": True},
    "hyperparameters": {"global_batch_size": 64, "lr": 0.1},
    "environment": {"environment_variables": ["A=1"]},
}


def test_the_configured_experiment_is_one_short_training_without_notifications() -> None:
    tree = BASELINE.config(TREE, batches=200)
    assert tree["name"] == "digits: as configured"
    assert tree["labels"] == ["baseline", "throughput"]
    assert tree["notify"] == []
    assert tree["searcher"] == {
        "name": "single",
        "metric": "accuracy",
        "smaller_is_better": False,
        "max_length": {"batches": 200},
        "source_trial_id": None,
        "source_checkpoint_uuid": None,
    }
    assert (tree["scheduling_unit"], tree["max_restarts"]) == (20, 0)
    assert tree["resources"] == {
        "slots_per_trial": 4,
        "max_slots": None,
        "packed_slots": None,
        "resource_pool": "gpu",
    }
    assert tree["environment"]["environment_variables"] == ["A=1", "HPC_DET_THROUGHPUT=data"]


def test_each_measurement_changes_one_thing() -> None:
    as_it_is = BASELINE.config(TREE, 200)
    as_it_is.pop("name")

    def differing(tree: dict[str, Any]) -> set[str]:
        return {key for key, value in as_it_is.items() if tree[key] != value}

    first_batch, rare = FIRST_BATCH.config(TREE, 200), RARE.config(TREE, 200)
    assert differing(first_batch) == {"environment"}
    assert first_batch["environment"]["environment_variables"][-1] == "HPC_DET_THROUGHPUT=first batch"
    assert differing(rare) == {"optimizations"}
    assert rare["optimizations"] == {"aggregation_frequency": 1000, "gradient_compression": True}
    assert differing(batches_of(128).config(TREE, 200)) == {"hyperparameters"}
    assert differing(on(2).config(TREE, 200)) == {"hyperparameters", "resources"}
    assert on(2).config(TREE, 200)["hyperparameters"] == {"global_batch_size": 32, "lr": 0.1}


def test_the_experiment_itself_stays_as_it_is() -> None:
    before = deepcopy(TREE)
    on(2).config(TREE, 10)
    assert before == TREE


def test_variables_may_be_listed_by_the_type_of_slots_and_not_for_every_one() -> None:
    tree = BASELINE.config({**TREE, "environment": {"environment_variables": {"cuda": ["B=2"]}}}, 10)
    variables = Environment.model_validate(tree["environment"]).variables
    assert variables("gpu") == ["B=2", "HPC_DET_THROUGHPUT=data"]
    assert variables("cpu") == ["HPC_DET_THROUGHPUT=data"]


def test_the_first_report_does_not_count() -> None:
    found = Throughput.of_reports(BASELINE, [1.0, 90.0, 100.0, 110.0, 100.0, 100.0], experiment=7)
    assert (found.samples_per_s, found.spread, found.experiment) == (100.0, 0.0, 7)
    assert Throughput.of_reports(BASELINE, [1.0, 80.0, 100.0, 120.0], experiment=7).spread == pytest.approx(0.2)
    assert Throughput.of_reports(BASELINE, [1.0, 80.0], experiment=7).samples_per_s == 80.0


def test_too_large_a_batch_is_a_result_and_another_failure_is_none() -> None:
    out_of_memory, out_of_data, other = (
        failed(BASELINE, why) for why in (OUT_OF_MEMORY, f"rank 0 on node1: {NO_WHOLE_BATCH}", "rank 0: ValueError: no")
    )
    assert out_of_memory.is_out_of_memory
    assert out_of_data.is_out_of_data
    assert [each.is_a_result for each in (out_of_memory, out_of_data, other)] == [True, True, False]


CLUSTER = Cluster(name="test", scheduler="slurm", slots_per_node=2, max_nodes=4, slot_type="gpu")


def experiment(slots: int = 4, aggregation_frequency: int = 1, **hyperparameters: Any) -> dict[str, Any]:
    return {
        "resources": {"slots_per_trial": slots},
        "optimizations": {"aggregation_frequency": aggregation_frequency},
        "hyperparameters": {"global_batch_size": 64, **hyperparameters},
    }


def test_an_experiment_is_compared_with_itself_without_loading_without_exchange_and_on_fewer_slots() -> None:
    found = variations(experiment(), CLUSTER)
    assert found.baseline == BASELINE
    assert (found.conditions.nodes, found.conditions.value("optimizations.aggregation_frequency", 0)) == (2, 1)
    assert [(one.aim, one.slots, one.batch_size) for one in found.others] == [
        (Aim.INPUT, 4, 64),
        (Aim.COMMUNICATION, 4, 64),
        (Aim.SLOTS, 1, 16),
        (Aim.SLOTS, 2, 32),
    ]
    assert [one.trains_on for one in found.others[:2]] == ["first batch", "data"]
    assert [one.aggregation_frequency for one in found.others[:2]] == [1, 1000]
    assert found.grows_batches
    assert found.left_out == ()


def test_a_batch_that_slots_do_not_share_evenly_is_one_that_they_do_on_others() -> None:
    sizes = {one.slots: one.batch_size for one in variations(experiment(global_batch_size=67), CLUSTER, 8).others}
    assert sizes == {4: 67, 1: 16, 2: 32, 8: 128}


def test_one_slot_exchanges_nothing_and_is_not_scaled() -> None:
    found = variations(experiment(slots=1), CLUSTER)
    assert [one.aim for one in found.others] == [Aim.INPUT]
    assert [reason.partition(":")[0] for reason in found.left_out] == ["communication", "scaling"]


def test_without_a_batch_size_only_the_trial_knows_it() -> None:
    found = variations(experiment(global_batch_size=None), CLUSTER)
    assert not found.grows_batches
    assert {one.batch_size for one in found.others} == {None}
    assert not unnamed(found.left_out[0], "hyperparameters.global_batch_size")


def test_constants_may_be_written_in_full() -> None:
    assert variations(experiment(global_batch_size={"type": "const", "val": 32}), CLUSTER).baseline.batch_size == 32


@pytest.mark.parametrize(("most", "facts"), [(3, [2, 4]), (16, [8])])
def test_slots_that_no_trial_can_have_are_refused(most: int, facts: list[int]) -> None:
    with refused(UsageError, "--max-slots", most, *facts):
        variations(experiment(), CLUSTER, most)


@pytest.mark.parametrize(
    ("most", "per_node", "counts"),
    [
        (1, 8, [1]),
        (3, 8, [1, 2, 3]),
        (8, 8, [1, 2, 4, 8]),
        (6, 6, [1, 2, 4, 6]),
        (24, 6, [1, 2, 4, 6, 12, 24]),
        (12, 4, [1, 2, 4, 8, 12]),
        (4, 1, [1, 2, 4]),
    ],
)
def test_slots_are_doubled_within_a_node_and_then_nodes_are(most: int, per_node: int, counts: list[int]) -> None:
    assert slot_counts(most, per_node) == counts


def test_batches_grow_until_memory_is_full() -> None:
    found = [measured(BASELINE, 100)]
    assert larger_batch(found, is_memory_bound=True) == batches_of(128)
    found.append(measured(batches_of(128), 100))
    assert larger_batch(found, is_memory_bound=True) == batches_of(256)
    found.append(failed(batches_of(256), OUT_OF_MEMORY))
    assert larger_batch(found, is_memory_bound=True) is None


def test_where_memory_is_no_limit_batches_grow_as_long_as_it_pays() -> None:
    found = [measured(BASELINE, 100), measured(batches_of(128), 106)]
    assert larger_batch(found, is_memory_bound=False) == batches_of(256)
    found.append(measured(batches_of(256), 110))
    assert larger_batch(found, is_memory_bound=False) is None


def test_batches_do_not_grow_for_ever() -> None:
    found = [measured(BASELINE, 100)]
    while one := larger_batch(found, is_memory_bound=True):
        found.append(measured(one, 100))
    assert len(found) == 1 + MOST_DOUBLINGS
