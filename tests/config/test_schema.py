from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from hpc_det.config.cluster import Cluster
from hpc_det.config.fields import Length, time_limit_min
from hpc_det.config.schema import Experiment
from hpc_det.plan.effective import Effective
from tests.config.conftest import CONFIG


def test_the_defaults_are_determineds() -> None:
    tree = Experiment.model_validate(CONFIG).model_dump(mode="json")
    assert tree == {
        **CONFIG,
        "searcher": {
            "name": "single",
            "metric": "accuracy",
            "smaller_is_better": True,
            "source_trial_id": None,
            "source_checkpoint_uuid": None,
            "max_length": {"batches": 10},
        },
        "description": "",
        "labels": [],
        "project": "",
        "workspace": "",
        "data": {},
        "debug": False,
        "hyperparameters": {},
        "resources": {
            "slots_per_trial": 1,
            "max_slots": None,
            "packed_slots": None,
            "resource_pool": None,
            "time_limit": None,
            "weight": 1,
            "priority": None,
            "shm_size": None,
            "devices": [],
            "native_parallel": False,
            "is_single_node": False,
            "agent_label": None,
        },
        "max_restarts": 5,
        "max_attempts_without_progress": 5,
        "records_per_epoch": 0,
        "scheduling_unit": 100,
        "min_validation_period": {"batches": 0},
        "min_checkpoint_period": {"batches": 0},
        "checkpoint_interval": "auto",
        "asynchronous_checkpoints": True,
        "checkpoint_staging": None,
        "hang_timeout_s": None,
        "perform_initial_validation": False,
        "checkpoint_policy": "best",
        "reproducibility": {"experiment_seed": None},
        "optimizations": {
            "aggregation_frequency": 1,
            "average_aggregated_gradients": True,
            "average_training_metrics": True,
            "gradient_compression": False,
            "mixed_precision": "O0",
            "tensor_fusion_threshold": None,
            "tensor_fusion_cycle_time": 1,
            "auto_tune_tensor_fusion": False,
        },
        "profiling": {"enabled": False, "begin_on_batch": 0, "end_after_batch": None, "sync_timings": True},
        "environment": {
            "image": None,
            "environment_variables": [],
            "force_pull_image": False,
            "registry_auth": None,
            "add_capabilities": [],
            "drop_capabilities": [],
            "ports": {},
            "proxy_ports": [],
            "pod_spec": None,
        },
        "bind_mounts": [],
        "slurm": {"slots_per_node": None, "gpu_type": None, "sbatch_args": []},
        "pbs": {"slots_per_node": None, "gpu_type": None, "pbsbatch_args": []},
        "checkpoint_storage": {
            "type": None,
            "save_experiment_best": 0,
            "save_trial_best": 1,
            "save_trial_latest": 1,
        },
        "log_policies": [],
        "notify": [],
        "retention_policy": {"log_retention_days": None},
        "preemption_timeout": None,
        "integrations": None,
        "tensorboard_storage": None,
        "security": None,
        "data_layer": None,
        "internal": None,
    }


def test_an_experiment_survives_json() -> None:
    experiment = Experiment.model_validate({**CONFIG, "resources": {"time_limit": 90}, "min_validation_period": 3})
    assert Experiment.model_validate_json(experiment.model_dump_json()) == experiment


def test_an_experiment_is_frozen() -> None:
    with pytest.raises(ValidationError):
        Experiment.model_validate(CONFIG).max_restarts = 3


@pytest.mark.parametrize(
    ("written", "length"),
    [
        ({"batches": 5}, Length(5)),
        ({"records": 5}, Length(5, "records")),
        ({"epochs": 0}, Length(0, "epochs")),
        (7, Length(7, "batches")),
    ],
)
def test_a_length_has_a_unit_and_an_amount(written: Any, length: Length) -> None:
    assert Experiment.model_validate({**CONFIG, "min_validation_period": written}).min_validation_period == length


@pytest.mark.parametrize(
    "written", [{}, {"batches": 1, "epochs": 1}, {"steps": 1}, {"batches": -1}, "5", 1.5, True, []]
)
def test_any_other_length_is_refused(written: Any, problems: Callable[..., list[str]]) -> None:
    (problem,) = problems(min_validation_period=written)
    assert problem.startswith(f"min_validation_period: got {written!r}")
    assert "expected one of batches, records, epochs with a whole number >= 0" in problem


@pytest.mark.parametrize(
    ("limit", "minutes"),
    [(90, 90), ("90", 90), ("01:30:00", 90), ("00:00:01", 1), ("1-00:00:01", 1441), ("100:00:00", 6000)],
)
def test_a_time_limit_is_minutes_rounded_up(limit: str | int, minutes: int) -> None:
    assert time_limit_min(limit) == minutes


@pytest.mark.parametrize("limit", [0, -5, "0", "1:30", "00:60:00", "1-2", "soon", True, 1.5, "00:00:00"])
def test_any_other_time_limit_is_refused(limit: Any) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the message is made where the path is known
        time_limit_min(limit)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"max_restarts": -1}, "max_restarts: got -1 (from config); expected a whole number >= 0"),
        ({"max_restarts": True}, "max_restarts: got True (from config); expected a whole number >= 0"),
        ({"max_restarts": "5"}, "max_restarts: got '5' (from config); expected a whole number >= 0"),
        ({"scheduling_unit": 0}, "scheduling_unit: got 0 (from config); expected a whole number >= 1"),
        ({"checkpoint_policy": "some"}, "checkpoint_policy: got 'some' (from config); expected best, all or none"),
        ({"labels": ["a", 1]}, "labels[1]: got 1 (from config); expected a list of texts, each one once"),
        ({"name": " "}, "name: got ' ' (from config); expected a name for the experiment, not empty"),
        (
            {"resources": {"slots_per_trail": 2}},
            "resources.slots_per_trail: unknown key 'slots_per_trail' (from config); did you mean 'slots_per_trial'?",
        ),
        (
            {"reproducibility": 3},
            "reproducibility: got 3 (from config); expected a map with keys of experiment_seed",
        ),
        (
            {"reproducibility": {"experiment_seed": 2**31}},
            "reproducibility.experiment_seed: got 2147483648 (from config); "
            "expected a whole number from 0 to 2147483647",
        ),
        (
            {"environment": {"environment_variables": {"cpu": ["A=1", "B"]}}},
            "environment.environment_variables.cpu[1]: got 'B' (from config); "
            "expected a list of NAME=value, or such a list for each of cpu, cuda, rocm",
        ),
        (
            {"slurm": {"sbatch_args": ["-v", "-t10"]}},
            "slurm.sbatch_args: hpc_det sets --time itself, got '-t10' (from config); set resources.time_limit",
        ),
        (
            {"searcher": {"name": "grit", "max_length": 1}},
            "searcher.name: got 'grit' (from config); did you mean 'grid'? expected one of single, random, grid, "
            "points, async_halving, adaptive_asha, optuna, custom",
        ),
        (
            {"cluster": {"slots_per_node": 0}},
            "cluster.slots_per_node: got 0 (from cluster 'lab'); expected a whole number >= 1",
        ),
        (
            {"cluster": {"slot_per_node": 1}},
            "cluster.slot_per_node: unknown key 'slot_per_node' (from cluster 'lab'); did you mean 'slots_per_node'?",
        ),
        (
            {"cluster": {"mem_per_node": "lots"}},
            "cluster.mem_per_node: got 'lots' (from cluster 'lab'); expected a size such as 16G",
        ),
    ],
)
def test_a_wrong_value_is_told_with_its_path_and_what_is_expected(
    change: dict[str, Any], problem: str, problems: Callable[..., list[str]]
) -> None:
    assert problems(**change) == [problem]


@pytest.mark.parametrize("entrypoint", ["", " ", [], [""], [1], 5, {"a": 1}])
def test_an_entrypoint_is_a_command(entrypoint: Any, problems: Callable[..., list[str]]) -> None:
    (problem,) = problems(entrypoint=entrypoint)
    assert problem.startswith(f"entrypoint: got {entrypoint!r}")


def test_null_is_unset_everywhere(build: Callable[..., Effective]) -> None:
    nulls = {"max_restarts": None, "resources": None, "checkpoint_storage": {"save_trial_best": None}}
    assert build(**nulls).tree == build().tree


def test_an_unknown_key_is_an_error_even_if_it_is_null(problems: Callable[..., list[str]]) -> None:
    assert problems(max_restart=None) == ["max_restart: unknown key 'max_restart'; did you mean 'max_restarts'?"]


def test_a_cluster_needs_little() -> None:
    cluster = Cluster.model_validate({"name": "x", "scheduler": "local", "slots_per_node": 1, "slot_type": "cpu"})
    assert (cluster.gpu_flag, cluster.signal_lead_s, cluster.cpus_per_slot) == ("gpus-per-node", 90, 1)
