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
from tests.facts import each_names, golden, unnamed


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
            "cpus_per_slot": None,
            "memory_per_slot": None,
            "account": None,
            "qos": None,
            "constraint": None,
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
        "launch": {"nursery": True, "preload": []},
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
            "grad_updates_size_file": None,
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
            "bundle": False,
            "stage": "none",
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
        "loggers": [],
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
    assert not unnamed(problem, "min_validation_period", repr(written))
    assert not unnamed(problem, 0, "batches", "records", "epochs")


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


WRONG_VALUES: list[tuple[dict[str, Any], list[object]]] = [
    ({"max_restarts": -1}, ["max_restarts", "-1", 0]),
    ({"max_restarts": True}, ["max_restarts", "True", 0]),
    ({"max_restarts": "5"}, ["max_restarts", "'5'", 0]),
    ({"scheduling_unit": 0}, ["scheduling_unit", 0, 1]),
    ({"checkpoint_policy": "some"}, ["checkpoint_policy", "'some'", "best", "all", "none"]),
    ({"labels": ["a", 1]}, ["labels[1]", 1]),
    ({"name": " "}, ["name", "' '"]),
    (
        {"resources": {"slots_per_trail": 2}},
        ["resources.slots_per_trail", "'slots_per_trail'", "'slots_per_trial'"],
    ),
    (
        {"reproducibility": 3},
        ["reproducibility", 3, "experiment_seed"],
    ),
    (
        {"reproducibility": {"experiment_seed": 2**31}},
        ["reproducibility.experiment_seed", 2147483648, 0, 2147483647],
    ),
    (
        {"environment": {"environment_variables": {"cpu": ["A=1", "B"]}}},
        ["environment.environment_variables.cpu[1]", "'B'", "NAME=value", "cpu", "cuda", "rocm"],
    ),
    (
        {"slurm": {"sbatch_args": ["-v", "-t10"]}},
        ["slurm.sbatch_args", "hpc_det", "--time", "'-t10'", "resources.time_limit"],
    ),
    (
        {"searcher": {"name": "grit", "max_length": 1}},
        [
            "searcher.name",
            "'grit'",
            "'grid'",
            "async_halving",
            "adaptive_asha",
            "single",
            "random",
            "grid",
            "points",
            "optuna",
            "custom",
        ],
    ),
    (
        {"cluster": {"slots_per_node": 0}},
        ["cluster.slots_per_node", 0, "'lab'", 1],
    ),
    (
        {"cluster": {"slot_per_node": 1}},
        ["cluster.slot_per_node", "'slot_per_node'", "'lab'", "'slots_per_node'"],
    ),
    (
        {"cluster": {"mem_per_node": "lots"}},
        ["cluster.mem_per_node", "'lots'", "'lab'", "16G"],
    ),
]


@pytest.mark.parametrize(
    ("change", "facts"),
    WRONG_VALUES,
)
def test_a_wrong_value_is_told_with_its_path_and_what_is_expected(
    change: dict[str, Any], facts: list[object], problems: Callable[..., list[str]]
) -> None:
    each_names(problems(**change), facts)


def test_the_words_for_a_wrong_value(problems: Callable[..., list[str]]) -> None:
    assert [problem for change, _ in WRONG_VALUES for problem in problems(**change)] == golden(__file__, "schema.txt")


@pytest.mark.parametrize("entrypoint", ["", " ", [], [""], [1], 5, {"a": 1}])
def test_an_entrypoint_is_a_command(entrypoint: Any, problems: Callable[..., list[str]]) -> None:
    (problem,) = problems(entrypoint=entrypoint)
    assert not unnamed(problem, "entrypoint", repr(entrypoint))


def test_null_is_unset_everywhere(build: Callable[..., Effective]) -> None:
    nulls = {"max_restarts": None, "resources": None, "checkpoint_storage": {"save_trial_best": None}}
    assert build(**nulls).tree == build().tree


def test_an_unknown_key_is_an_error_even_if_it_is_null(problems: Callable[..., list[str]]) -> None:
    each_names(problems(max_restart=None), ["max_restart", "'max_restart'", "'max_restarts'"])


def test_a_cluster_needs_little() -> None:
    cluster = Cluster.model_validate({"name": "x", "scheduler": "local", "slots_per_node": 1, "slot_type": "cpu"})
    assert (cluster.gpu_flag, cluster.signal_lead_s, cluster.cpus_per_slot) == ("gpus-per-node", 90, 1)
