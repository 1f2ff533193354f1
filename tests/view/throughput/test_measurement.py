from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from hpc_det.config.job_sections import Environment
from hpc_det.config.rank_variables import NO_WHOLE_BATCH
from hpc_det.view.throughput.measurement import Measured
from tests.view.throughput.measurements import BASELINE, FIRST_BATCH, OUT_OF_MEMORY, RARE, batches_of, failed, on

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


def test_the_experiment_as_configured_is_one_short_training_that_nobody_is_told_of() -> None:
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
    found = Measured.of_reports(BASELINE, [1.0, 90.0, 100.0, 110.0, 100.0, 100.0], experiment=7)
    assert (found.samples_per_s, found.spread, found.experiment) == (100.0, 0.0, 7)
    assert Measured.of_reports(BASELINE, [1.0, 80.0, 100.0, 120.0], experiment=7).spread == pytest.approx(0.2)
    assert Measured.of_reports(BASELINE, [1.0, 80.0], experiment=7).samples_per_s == 80.0


def test_too_large_a_batch_is_a_result_and_another_failure_is_none() -> None:
    out_of_memory, out_of_data, other = (
        failed(BASELINE, why) for why in (OUT_OF_MEMORY, f"rank 0 on node1: {NO_WHOLE_BATCH}", "rank 0: ValueError: no")
    )
    assert out_of_memory.is_out_of_memory
    assert out_of_data.is_out_of_data
    assert [each.is_a_result for each in (out_of_memory, out_of_data, other)] == [True, True, False]
