"""The resources that an experiment requests for itself: in the job, within the profile's limits, on Slurm and PBS."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from hpc_det.plan.job_plan import JobArray, JobPlan
from hpc_det.plan.pbs_chunk import pbs_resources
from hpc_det.plan.planner import placement, plan_jobs
from hpc_det.plan.pool import in_its_pool, pool_notes, pool_problems
from hpc_det.schedulers.scheduler import scheduler
from hpc_det.store.folders import ExperimentFolder
from tests.facts import each_names
from tests.plan.sites import cluster, experiment

WANTED = {"cpus_per_slot": 6, "memory_per_slot": "20G", "account": "bio", "qos": "high", "constraint": "nvlink&ib"}
SITE = {"cpus_per_slot": 2, "mem_per_node": "16G", "account": "physics", "qos": "normal", "time_limit": "04:00:00"}
ON_PBS = {"scheduler": "pbs", "qos_resource": "qos"}


def problems(site: dict[str, Any] | None = None, **settings: Any) -> list[str]:
    return pool_problems(experiment(**settings), cluster(**(site or {})))


def planned(site: dict[str, Any], trials: int = 1, **settings: Any) -> JobPlan:
    asked = experiment(**settings)
    there = in_its_pool(asked, cluster(**site))
    return plan_jobs(
        asked, there, ExperimentFolder(Path("/x/12")), placement(asked, there, trials), python="/py/bin/py"
    )


def script_lines(plan: JobPlan, array: JobArray) -> list[str]:
    variables = scheduler(plan.scheduler).script_variables(plan, array, Path("/x/12/jobs/1.sh"))
    lines = variables["directives"]
    assert isinstance(lines, list)
    return lines


# --- the job


def test_what_the_experiment_requests_replaces_what_the_profile_has() -> None:
    plan = planned(SITE, resources={**WANTED, "slots_per_trial": 8, "time_limit": "01:00:00"})
    assert (plan.cpus_per_rank, plan.mem_per_node, plan.account, plan.qos) == (6, "80G", "bio", "high")
    assert (plan.constraint, plan.time_limit_min, plan.nodes) == ("nvlink&ib", 60, 2)


def test_what_it_does_not_request_is_the_profiles() -> None:
    plan = planned(SITE, resources={"slots_per_trial": 2})
    assert (plan.cpus_per_rank, plan.mem_per_node, plan.account, plan.qos) == (2, "16G", "physics", "normal")
    assert plan.constraint is None


def test_the_memory_of_a_job_follows_from_its_slots_on_a_node() -> None:
    memory = {"memory_per_slot": "1500M"}
    assert planned({}, resources={"slots_per_trial": 3, **memory}).mem_per_node == "4500M"
    shared = {"slots_per_trial": 1, "packed_slots": 4, **memory}
    assert planned({}, trials=8, resources=shared).mem_per_node == "6000M"
    assert planned({}, resources={"memory_per_slot": "7"}).mem_per_node == "7"


@pytest.mark.parametrize("array", [JobArray(first=0, count=1), JobArray(first=0, count=5, at_once=2)])
def test_jobs_and_arrays_of_slurm_carry_every_request(array: JobArray) -> None:
    lines = script_lines(planned({}, resources={**WANTED, "slots_per_trial": 2}), array)
    flags = {"--cpus-per-task=12", "--mem=40G", "--account=bio", "--qos=high", '"--constraint=nvlink&ib"'}
    assert flags <= {*lines}


@pytest.mark.parametrize("array", [JobArray(first=0, count=1), JobArray(first=0, count=5, at_once=2)])
def test_jobs_and_arrays_of_pbs_carry_every_request(array: JobArray) -> None:
    lines = script_lines(planned(ON_PBS, resources={**WANTED, "slots_per_trial": 2}), array)
    chunk = "ncpus=12:ngpus=2:mpiprocs=1:ompthreads=6:mem=40gb:nvlink=True:ib=True"
    assert {f"-l select=1:{chunk}", "-A bio", "-l qos=high"} <= {*lines}


def test_an_older_plan_lacks_them() -> None:
    data = planned({}).to_json().replace('"constraint": null,', "").replace('"qos_resource": null,', "")
    assert "constraint" not in data
    assert JobPlan.from_json(data) == planned({})


# --- limits


def test_every_limit_is_reported_at_once_with_both_values_and_the_remedy() -> None:
    site = {
        "max_cpus_per_node": 32,
        "max_memory_per_node": "100G",
        "allowed_accounts": ["bio", "physics"],
        "allowed_qos": ["normal"],
        "allowed_constraints": ["nvlink"],
        "max_time_limit": "01:00:00",
    }
    wanted = {
        "slots_per_trial": 4,
        "cpus_per_slot": 9,
        "memory_per_slot": "30G",
        "account": "fysics",
        "qos": "high",
        "constraint": "nvlink&ib",
        "time_limit": "02:00:00",
    }
    each_names(
        problems(site, resources=wanted),
        ["resources.time_limit", "'02:00:00'", 120, "'01:00:00'", 60],
        ["resources.cpus_per_slot", 9, 4, 36, 32, "max_cpus_per_node", 8],
        ["resources.memory_per_slot", "'30G'", 4, "120G", "'100G'", "max_memory_per_node", "25G"],
        ["resources.account", "'fysics'", "'atlas'", "'physics'"],
        ["resources.qos", "'high'", "'atlas'", "normal"],
        ["resources.constraint", "'ib'", "'atlas'", "nvlink"],
    )
    within = {**wanted, "cpus_per_slot": 8, "memory_per_slot": "25G", "account": "bio", "qos": "normal"}
    assert problems(site, resources={**within, "constraint": "nvlink", "time_limit": "01:00:00"}) == []


def test_a_limit_of_the_pool_replaces_the_profiles() -> None:
    site = {"max_cpus_per_node": 8, "pools": {"fat": {"max_cpus_per_node": 128, "max_memory_per_node": "2T"}}}
    wanted = {"slots_per_trial": 4, "cpus_per_slot": 32, "memory_per_slot": "500G"}
    assert problems(site, resources={**wanted, "resource_pool": "fat"}) == []
    too_much = {**wanted, "resource_pool": "fat", "memory_per_slot": "600G"}
    each_names(problems(site, resources=too_much), ["resources.memory_per_slot", "2400G", "'2T'"])


@pytest.mark.parametrize(
    ("slots", "wanted", "fits"),
    [(1, "100G", True), (1, "101G", False), (4, "25G", True), (8, "25601M", False), (4, "26214400K", True)],
)
def test_memory_is_compared_whatever_its_unit(slots: int, wanted: str, fits: bool) -> None:
    found = problems({"max_memory_per_node": "100G"}, resources={"slots_per_trial": slots, "memory_per_slot": wanted})
    assert (found == []) is fits


@pytest.mark.parametrize("constraint", ["[rack1|rack2]", "nvlink&(rack1|rack2)", "[rack1*2&rack2*4]"])
def test_the_features_of_an_expression_are_compared_one_by_one(constraint: str) -> None:
    site = {"allowed_constraints": ["rack1", "rack2", "nvlink"]}
    assert problems(site, resources={"constraint": constraint}) == []
    each_names(
        problems({"allowed_constraints": ["rack1", "nvlink"]}, resources={"constraint": constraint}), ["'rack2'"]
    )


# --- PBS


def test_on_pbs_a_quality_of_service_needs_the_sites_resource_for_it() -> None:
    wanted = {"resources": {"qos": "high"}}
    each_names(problems({"scheduler": "pbs"}, **wanted), ["resources.qos", "'high'", "PBS", "'atlas'", "qos_resource"])
    each_names(problems({"scheduler": "pbs", "qos": "high"}), ["cluster.qos", "'high'", "PBS", "qos_resource"])
    assert problems(ON_PBS, **wanted) == []
    each_names(problems(ON_PBS, resources={"qos": "very high"}), ["resources.qos", "'very high'"])


@pytest.mark.parametrize("constraint", ["a|b", "[a*2]", "a&", "&", "a=b=c", "a,b"])
def test_on_pbs_a_constraint_is_a_list_of_resources(constraint: str) -> None:
    each_names(
        problems({"scheduler": "pbs"}, resources={"constraint": constraint}),
        ["resources.constraint", repr(constraint), "PBS", "NAME=VALUE"],
    )


@pytest.mark.parametrize("constraint", ["ncpus=64", "nvlink&mem=9gb", "host=n1"])
def test_a_constraint_sets_nothing_that_hpc_det_sets(constraint: str) -> None:
    each_names(problems({"scheduler": "pbs"}, resources={"constraint": constraint}), [repr(constraint), "hpc_det"])


def test_names_and_values_of_resources() -> None:
    assert pbs_resources("nvlink&cpu_type=milan") == ["nvlink=True", "cpu_type=milan"]
    assert pbs_resources("nvlink&ib&nvlink=True") == ["nvlink=True", "ib=True"]


# --- flags, and machines without a scheduler


@pytest.mark.parametrize(
    ("flag", "key", "value"),
    [
        ("--account=x", "account", "bio"),
        ("-A x", "account", "bio"),
        ("-qx", "qos", "high"),
        ("--constr=x", "constraint", "nvlink"),
        ("--mem=4G", "memory_per_slot", "8G"),
        ("--mem-per-cpu=4G", "memory_per_slot", "8G"),
    ],
)
def test_a_flag_of_sbatch_that_repeats_a_key_is_refused(flag: str, key: str, value: str) -> None:
    found = problems(resources={key: value}, slurm={"sbatch_args": [flag]})
    each_names(found, ["slurm.sbatch_args", flag.split()[0], f"resources.{key}", repr(value)])
    assert problems(slurm={"sbatch_args": [flag]}) == []


def test_a_flag_of_qsub_that_repeats_a_key_is_refused() -> None:
    found = problems({"scheduler": "pbs"}, resources={"account": "bio"}, pbs={"pbsbatch_args": ["-A x"]})
    each_names(found, ["pbs.pbsbatch_args", "-A", "resources.account", "'bio'"])
    assert problems({"scheduler": "pbs"}, pbs={"pbsbatch_args": ["-A x"]}) == []
    site = {"scheduler": "pbs", "qos_resource": "class"}
    found = problems(site, resources={"qos": "high"}, pbs={"pbsbatch_args": ["-l class=low"]})
    each_names(found, ["pbs.pbsbatch_args", "class=low", "resources.qos", "'high'"])
    assert problems(site, resources={"qos": "high"}, pbs={"pbsbatch_args": ["-l place=excl"]}) == []


def test_without_a_scheduler_only_cpus_have_an_effect() -> None:
    site = {"scheduler": "local", "max_nodes": 1}
    asked = experiment(resources=WANTED)
    assert pool_problems(asked, cluster(**site)) == []
    keys = [note.partition(":")[0] for note in pool_notes(asked, cluster(**site))]
    assert keys == [f"resources.{key}" for key in ("account", "qos", "constraint", "memory_per_slot")]
    assert planned(site, resources=WANTED).cpus_per_rank == 6


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("memory_per_slot", "16 G"),
        ("memory_per_slot", "0G"),
        ("memory_per_slot", "16Gi"),
        ("constraint", "a b"),
        ("constraint", "$(id)"),
        ("constraint", "a;b"),
        ("constraint", 'a"b'),
        ("constraint", "a\nb"),
        ("account", " "),
        ("cpus_per_slot", 0),
    ],
)
def test_a_value_that_no_scheduler_takes_is_refused(key: str, value: object) -> None:
    with pytest.raises(ValidationError, match=key):
        experiment(resources={key: value})
