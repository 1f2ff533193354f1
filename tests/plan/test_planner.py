from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_det.config.cluster import Cluster
from hpc_det.config.schema import Experiment
from hpc_det.errors import UsageError
from hpc_det.plan.job_plan import JobPlan
from hpc_det.plan.planner import placement, plan_jobs
from hpc_det.store.folders import ExperimentFolder
from tests.facts import refused

PYTHON = "/opt/venv/bin/python"
HARNESS = (PYTHON, "-m", "hpc_det.launch.direct", "--trial")


def cluster(**settings: Any) -> Cluster:
    required: dict[str, Any] = {"name": "atlas", "scheduler": "slurm", "slots_per_node": 4, "slot_type": "gpu"}
    return Cluster(**(required | settings))


def experiment(**settings: Any) -> Experiment:
    required: dict[str, Any] = {
        "name": "digits",
        "entrypoint": "model_def:DigitsTrial",
        "searcher": {"metric": "loss", "max_length": 10},
    }
    return Experiment(**(required | settings))


def plan(experiment: Experiment, cluster: Cluster) -> JobPlan:
    place = placement(experiment, cluster, 1)
    return plan_jobs(experiment, cluster, ExperimentFolder(Path("/state/experiments/12")), place, python=PYTHON)


@pytest.mark.parametrize(
    ("entrypoint", "argv"),
    [
        ("model_def:DigitsTrial", (*HARNESS, "model_def:DigitsTrial")),
        ("models.vision.digits:Trial", (*HARNESS, "models.vision.digits:Trial")),
        (" model_def:DigitsTrial\n", (*HARNESS, "model_def:DigitsTrial")),
        ("python3 train.py --lr 1", ("/bin/sh", "-c", "python3 train.py --lr 1")),
        ("echo $HOME; echo a:b", ("/bin/sh", "-c", "echo $HOME; echo a:b")),
        ("train.sh", ("/bin/sh", "-c", "train.sh")),
        (["python3", "train.py", "$HOME; no shell"], ("python3", "train.py", "$HOME; no shell")),
        (["model_def:DigitsTrial"], ("model_def:DigitsTrial",)),
    ],
)
def test_the_forms_of_an_entrypoint(entrypoint: str | list[str], argv: tuple[str, ...]) -> None:
    assert plan(experiment(entrypoint=entrypoint), cluster()).entrypoint == argv


def test_a_plan_names_its_folders_and_ids() -> None:
    found = plan(experiment(), cluster())
    assert (found.experiment_id, found.name) == (12, "digits")
    assert (found.folder, found.code) == ("/state/experiments/12", "/state/experiments/12/code")


def test_the_shape_and_the_limits_come_from_the_experiment() -> None:
    found = plan(experiment(resources={"slots_per_trial": 8, "time_limit": "00:30:01"}, max_restarts=2), cluster())
    assert (found.nodes, found.ranks_per_node, found.world_size) == (2, 4, 8)
    assert (found.time_limit_min, found.max_restarts) == (31, 2)


def test_the_sites_profile_says_who_pays_and_what_a_node_gives() -> None:
    found = plan(experiment(), cluster(account="physics", qos="normal", mem_per_node="16G"))
    assert (found.account, found.qos, found.mem_per_node) == ("physics", "normal", "16G")


def test_pool_and_time_limit_are_the_effective_experiments() -> None:
    found = plan(experiment(resources={"resource_pool": "debug", "time_limit": "00:10:00"}), cluster())
    assert (found.partition, found.time_limit_min) == ("debug", 10)


@pytest.mark.parametrize(("slot_type", "variables"), [("gpu", ("ON=gpu",)), ("cpu", ("ON=cpu",))])
def test_variables_by_device_follow_the_slots(slot_type: str, variables: tuple[str, ...]) -> None:
    asked = experiment(environment={"environment_variables": {"cuda": ["ON=gpu"], "cpu": ["ON=cpu"]}})
    assert plan(asked, cluster(slot_type=slot_type)).environment == variables


def test_flags_modules_and_setup_keep_their_order() -> None:
    site = cluster(srun_args=["--mpi=none", "-v"], modules=["gcc/12", "cuda/12.4"], setup=["ulimit -n 4096", "umask 7"])
    found = plan(experiment(slurm={"sbatch_args": ["--exclusive", "--mail-type=END"]}), site)
    assert found.srun_args == ("--mpi=none", "-v")
    assert found.submit_args == ("--exclusive", "--mail-type=END")
    assert (found.modules, found.setup) == (("gcc/12", "cuda/12.4"), ("ulimit -n 4096", "umask 7"))


def test_slots_that_fit_in_no_way_are_no_plan() -> None:
    with refused(UsageError, "resources.slots_per_trial", 5, 4, 8):
        plan(experiment(resources={"slots_per_trial": 5}), cluster())


def test_a_plan_survives_its_way_to_the_node() -> None:
    found = plan(experiment(), cluster(modules=["cuda"], slot_type="cpu"))
    assert JobPlan.from_json(found.to_json()) == found
