"""submitit's executors, configured for jobs of node agents."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import submitit

from hpc_det.errors import UsageError
from hpc_det.node.network import own_address
from hpc_det.sgd.capacity import GangJob, Local, Pool, capacity_of
from hpc_det.sgd.capacity.job import executor_of, gpus_of
from hpc_det.sgd.capacity.profile import gang_job
from hpc_det.submit.submitit_pbs.executor import Parameters, _is_pbs
from tests.facts import refused, unnamed
from tests.stub import Stub

STEP = ["--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--cpu-bind=none", "--mpi=none"]


@pytest.fixture(autouse=True)
def _site(stub: Stub) -> None:
    stub("srun", "")
    stub("qsub", "echo 'pbs_version = 23.06.06'")
    _is_pbs.cache_clear()


def test_a_name_with_submitits_parameters_makes_an_executor_of_that_cluster() -> None:
    made = executor_of("slurm", 3, {"timeout_min": 60, "gpus_per_node": 4, "slurm_partition": "low"})
    assert (made.name(), made.parameters) == (
        "slurm",
        {
            "job_name": "hpc-det-sgd",
            "time": 60,
            "gpus_per_node": 4,
            "partition": "low",
            "nodes": 3,
            "ntasks_per_node": 1,
            "additional_parameters": {"no-kill": True, "no-requeue": True},
            "srun_args": STEP,
        },
    )


def test_slurms_default_limit_counts_where_none_is_set_and_not_submitits_five_minutes() -> None:
    assert executor_of("slurm", 1, {}).parameters["time"] is None


def test_an_executor_of_the_users_stays_as_it_is(tmp_path: Path) -> None:
    theirs = submitit.AutoExecutor(tmp_path / "theirs", cluster="slurm")
    theirs.update_parameters(nodes=2, slurm_srun_args=["--label"], slurm_additional_parameters={"reservation": "x"})
    made = executor_of(theirs, None, {"gpus_per_node": 2})
    assert made.parameters["srun_args"] == ["--label", *STEP]
    assert made.parameters["additional_parameters"] == {"no-kill": True, "no-requeue": True, "reservation": "x"}
    assert (made.parameters["nodes"], made.parameters["ntasks_per_node"], gpus_of(made)) == (2, 1, 2)
    assert theirs.parameters == {
        "nodes": 2,
        "srun_args": ["--label"],
        "additional_parameters": {"reservation": "x"},
    }


@pytest.mark.parametrize(
    ("parameters", "gpus"),
    [
        ({"gpus_per_node": 4}, 4),
        ({"slurm_gpus_per_task": "a100:2"}, 2),
        ({"slurm_gres": "gpu:h100:8"}, 8),
        ({"slurm_gres": "gpu:3"}, 3),
        ({"cpus_per_task": 4}, 0),
    ],
)
def test_gpus_are_found_in_whatever_way_they_are_asked_for(parameters: dict[str, Any], gpus: int) -> None:
    assert gpus_of(executor_of("slurm", 1, parameters)) == gpus


@pytest.mark.integration
@pytest.mark.parametrize(
    ("name", "parameters", "facts"),
    [
        ("slurm", {"slurm_partion": "low"}, ["'partion'"]),
        ("slurm", {"gpus_per_node": "four"}, ["gpus_per_node"]),
        ("pbs", {}, ["timeout_min"]),
        ("lsf", {}, ["slurm", "pbs"]),
        ("local", {}, ["slurm", "pbs"]),
    ],
)
def test_what_submitit_refuses_is_the_users_error_and_leaves_no_folder(
    name: str, parameters: dict[str, Any], facts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    with refused(UsageError, f"executor '{name}'", *facts):
        GangJob(name, **parameters)
    assert [*here.iterdir()] == []


def test_what_no_gang_or_pool_can_be_is_refused() -> None:
    with refused(UsageError, "GangJob(nodes=0)", 1):
        GangJob("slurm", nodes=0)
    with refused(UsageError, "Pool(nodes=(3, 2))", "1 <= MIN <= MAX"):
        Pool("slurm", nodes=(3, 2))
    with refused(UsageError, "2 CPUs", 4, "cpus_per_task"):
        GangJob("slurm", cpus_per_task=2, cpus_per_worker=4)
    with refused(UsageError, "interface: ", socket.gethostname(), "'ib7'", "IPv4"):
        GangJob("slurm", interface="ib7")


@pytest.mark.integration
def test_slots_are_gpus_or_as_many_cpus_as_a_worker_takes_or_what_is_said() -> None:
    assert GangJob("slurm", 2, gpus_per_node=4).slots == 8
    assert GangJob("slurm", 2, cpus_per_task=8, cpus_per_worker=4).slots == 4
    assert GangJob("slurm", 2, cpus_per_task=8, slots_per_node=1).slots == 2
    pool = Pool("slurm", (1, 3), gpus_per_node=4)
    assert (pool.min_slots, pool.slots) == (4, 12)


PROFILE = """
name: lab
scheduler: {scheduler}
slots_per_node: 4
slot_type: gpu
gpu_flag: gres
gpu_type: a100
cpus_per_slot: 6
max_nodes: 2
mem_per_node: 16G
resource_pool: low
account: physics
time_limit: "02:00:00"
modules: [cuda/12.4]
setup: [ulimit -n 65536]
environment_variables: ["GREETING=it's me"]
"""
SETUP = ["module load cuda/12.4 || exit", "ulimit -n 65536", "export GREETING='it'\"'\"'s me'"]


@pytest.fixture
def root(state_folder: Path) -> Path:
    folder = state_folder / "conf" / "cluster"
    folder.mkdir(parents=True)
    for scheduler in ("slurm", "pbs"):
        (folder / f"lab-{scheduler}.yaml").write_text(PROFILE.format(scheduler=scheduler))
    return state_folder


@pytest.mark.integration
def test_a_profile_of_slurm_makes_a_job_on_as_few_nodes_as_hold_the_workers(root: Path) -> None:
    made = gang_job("lab-slurm", {"HPC_DET_ROOT": str(root)}, 6, 1, use_gpu=True)
    assert isinstance(made, GangJob)
    assert (made.slots, made.has_gpus) == (8, True)
    assert made._executor.parameters == {
        "job_name": "hpc-det-sgd",
        "nodes": 2,
        "ntasks_per_node": 1,
        "cpus_per_task": 24,
        "time": 120,
        "partition": "low",
        "account": "physics",
        "signal_delay_s": 90,
        "setup": SETUP,
        "srun_args": STEP,
        "additional_parameters": {"no-kill": True, "no-requeue": True, "gres": "gpu:a100:4", "mem": "16G"},
    }


@pytest.mark.integration
def test_a_profile_of_pbs_says_the_same_in_its_words(root: Path) -> None:
    made = gang_job("lab-pbs", {"HPC_DET_ROOT": str(root)}, 3, 8, use_gpu=False)
    assert isinstance(made, GangJob)
    assert (made.slots, made.has_gpus) == (3, False)
    asked = {name: made._executor.parameters[name] for name in ("nodes", "cpus_per_task", "mem_gb", "timeout_min")}
    assert asked == {"nodes": 1, "cpus_per_task": 24, "mem_gb": 16.0, "timeout_min": 120}
    assert "gpus_per_node" not in made._executor.parameters
    assert made._executor.parameters["setup"] == SETUP


@pytest.mark.integration
def test_a_job_on_pbs_has_the_quality_of_service_and_the_gpu_type_of_its_profile(root: Path) -> None:
    profile = f"{PROFILE.format(scheduler='pbs')}qos: high\n"
    (root / "conf" / "cluster" / "lab-pbs.yaml").write_text(f"{profile}qos_resource: qos\n")
    made = gang_job("lab-pbs", {"HPC_DET_ROOT": str(root)}, 4, 1, use_gpu=True)
    assert isinstance(made, GangJob)
    lines = Parameters.of(made._executor.parameters).directives()
    assert "-l qos=high" in lines
    assert "-l select=1:ncpus=24:mpiprocs=1:ompthreads=24:ngpus=4:gpu_type=a100:mem=16384mb" in lines
    (root / "conf" / "cluster" / "lab-pbs.yaml").write_text(profile)
    with refused(UsageError, "cluster.qos", "'high'", "qos_resource"):
        gang_job("lab-pbs", {"HPC_DET_ROOT": str(root)}, 4, 1, use_gpu=True)


@pytest.mark.integration
@pytest.mark.parametrize("scheduler", ["slurm", "pbs"])
def test_a_job_goes_to_the_default_pool_of_its_profile(root: Path, scheduler: str) -> None:
    pools = "pools: {debug: {}, fat: {default: true, slots_per_node: 8}}\n"
    profile = PROFILE.format(scheduler=scheduler).replace("resource_pool: low\n", pools)
    (root / "conf" / "cluster" / "lab.yaml").write_text(profile)
    made = gang_job("lab", {"HPC_DET_ROOT": str(root)}, 8, 1, use_gpu=True)
    assert isinstance(made, GangJob)
    asked = made._executor.parameters
    assert (asked["partition" if scheduler == "slurm" else "queue"], asked["nodes"]) == ("fat", 1)


@pytest.mark.integration
def test_the_interface_of_a_profile_counts_where_this_host_has_it(
    root: Path, stub: Stub, caplog: pytest.LogCaptureFixture
) -> None:
    stub("sinfo", f"echo {socket.gethostname()}")
    made = {}
    for interface in ("lo", "ib7"):
        profile = f"{PROFILE.format(scheduler='slurm')}dtrain_network_interface: {interface}\n"
        (root / "conf" / "cluster" / f"{interface}.yaml").write_text(profile)
        with caplog.at_level("INFO"):
            job = gang_job(interface, {"HPC_DET_ROOT": str(root)}, 6, 1, use_gpu=True)
        assert isinstance(job, GangJob)
        made[interface] = job.host
    assert made == {"lo": "127.0.0.1", "ib7": own_address(2, None)[0]}
    assert unnamed(caplog.text, "dtrain_network_interface", "ib7") == []


def test_more_workers_than_a_cluster_takes_are_refused(root: Path) -> None:
    with refused(UsageError, "num_workers: ", "9 workers", "3 nodes", 4, "cluster 'lab'", 2, 8):
        gang_job("lab-slurm", {"HPC_DET_ROOT": str(root)}, 9, 1, use_gpu=True)


def test_more_cpus_than_a_node_may_give_are_refused(root: Path) -> None:
    profile = f"{PROFILE.format(scheduler='slurm')}max_cpus_per_node: 24\n"
    (root / "conf" / "cluster" / "lab-slurm.yaml").write_text(profile)
    with refused(UsageError, "num_cpus_per_worker", 8, "4 slots", "32 CPUs", "max_cpus_per_node", 24):
        gang_job("lab-slurm", {"HPC_DET_ROOT": str(root)}, 4, 8, use_gpu=True)


@pytest.mark.integration
def test_a_name_is_that_of_a_profile(root: Path) -> None:
    env = {"HPC_DET_ROOT": str(root), "CUDA_VISIBLE_DEVICES": ""}
    assert isinstance(capacity_of("lab-slurm", env, num_workers=2), GangJob)
    assert isinstance(capacity_of("local", env), Local)
    with refused(UsageError, "cluster", "'lab-slrum'", "'lab-slurm'"):
        capacity_of("lab-slrum", env)


def test_nothing_said_is_this_machine_but_in_an_allocation_with_other_hosts() -> None:
    assert isinstance(capacity_of(None, {"CUDA_VISIBLE_DEVICES": ""}), Local)
    job = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_CPUS_PER_NODE": "4(x2)"}
    assert capacity_of(None, {**job, "SLURMD_NODENAME": "n1"}, cpus_per_worker=2).slots == 4
    own = {**job, "SLURM_JOB_NODELIST": socket.gethostname(), "SLURM_JOB_CPUS_PER_NODE": "4", "SLURMD_NODENAME": "n1"}
    assert isinstance(capacity_of(None, {**own, "CUDA_VISIBLE_DEVICES": ""}), Local)


@pytest.mark.integration
def test_objects_are_taken_as_they_are_and_strangers_are_named(tmp_path: Path) -> None:
    local = Local(2)
    assert capacity_of(local) is local
    executor = submitit.SlurmExecutor(tmp_path / "jobs")
    executor.update_parameters(nodes=2, cpus_per_task=4)
    assert capacity_of(executor, cpus_per_worker=2).slots == 4
    with refused(UsageError, "executor: ", 7, "'local'", "'allocation'", "GangJob"):
        capacity_of(7)  # type: ignore[arg-type]
