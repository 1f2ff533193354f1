"""Profiles compared with their sites."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hpc_det.doctor import Finding
from hpc_det.doctor.profiles import Profile, default, findings, read, without_any
from hpc_det.errors import UsageError
from hpc_det.schedulers.pbs import detect as pbs
from hpc_det.schedulers.scheduler import Run
from hpc_det.schedulers.slurm import detect as slurm
from tests.doctor.sites import ATLAS, LAB, cluster, everything, on_path, one, pbs_site, slurm_site, verdicts
from tests.facts import golden, refused, unnamed

ON_LAB: dict[str, Any] = {
    "cpus_per_slot": 4,
    "pools": {"low": {"default": True, "preempt_mode": "requeue", "grace_time_s": 30}, "high": {}},
}


def checked(run: Run, **keys: Any) -> list[Finding]:
    return list(findings(Profile("profile lab", cluster(**keys)), slurm.detect(run), run, everything))


def written(root: Path, name: str, text: str) -> None:
    folder = root / "conf" / "cluster"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.yaml").write_text(text)


def test_a_profile_that_fits() -> None:
    found = checked(slurm_site(LAB), **ON_LAB)
    assert set(verdicts(found)) == {"ok"}
    assert one(found, "resume: auto", "successor")
    assert one(found, "--test-only", "partition low")
    assert [finding.message for finding in found] == golden(__file__, "profile.txt")


def test_a_pool_that_the_site_does_not_have() -> None:
    found = one(checked(slurm_site(LAB), pools={"lwo": {}}), "pool lwo")
    assert (found.verdict, unnamed(found.remedy, "'low'")) == ("problem", [])


def test_more_gpus_than_nodes_have() -> None:
    found = one(checked(slurm_site(LAB), slots_per_node=4), "4 GPUs")
    assert found.verdict == "problem"
    assert not unnamed(found.message, 2)


def test_fewer_gpus_than_nodes_have_may_be_meant() -> None:
    assert one(checked(slurm_site(LAB), slots_per_node=1), "1 GPU ").verdict == "note"


def test_cpus_are_counted_with_those_of_each_slot() -> None:
    cpus = {"slot_type": "cpu", "slots_per_node": 32, "cpus_per_slot": 4, "resource_pool": "compute"}
    assert one(checked(slurm_site(ATLAS), **cpus), "128 CPUs").verdict == "ok"


def test_gpus_that_a_pool_does_not_have() -> None:
    found = one(checked(slurm_site(ATLAS), resource_pool="compute"), "compute", 0)
    assert found.verdict == "problem"


def test_nodes_that_differ_are_named() -> None:
    found = one(checked(slurm_site(ATLAS), slots_per_node=8, resource_pool="gpu"), "8 GPUs")
    assert (found.verdict, "8 h100" in found.message) == ("note", True)


def test_a_preemption_that_the_profile_does_not_know_of() -> None:
    found = one(checked(slurm_site(LAB), resource_pool="low"), "preempts")
    assert not unnamed(found.remedy, "preempt_mode: requeue", "grace_time_s: 30")


def test_a_preemption_without_grace_time() -> None:
    pools = {"scavenge": {"preempt_mode": "requeue", "grace_time_s": 0, "slots_per_node": 4}}
    assert one(checked(slurm_site(ATLAS), pools=pools), "scavenge", "grace time").verdict == "note"


@pytest.mark.parametrize(
    ("keys", "config", "remedy"),
    [
        ({"max_array_size": 20000}, {}, "max_array_size: 10001"),
        ({}, {"SelectType": "select/linear"}, "gpu_flag: gres"),
    ],
)
def test_settings_that_the_site_refuses(keys: dict[str, Any], config: dict[str, str], remedy: str) -> None:
    assert [found for found in checked(slurm_site(LAB, **config), **keys) if not unnamed(found.remedy, remedy)]


def test_an_account_that_slurm_refuses() -> None:
    assert one(checked(slurm_site(LAB, sbatch=None), **ON_LAB), "Invalid account").verdict == "problem"


@pytest.mark.parametrize(("runtime", "verdict"), [("pyxis", "problem"), ("podman", "note")])
def test_a_container_runtime_that_is_not_there(runtime: str, verdict: str) -> None:
    run = slurm_site(LAB)
    profile = Profile("profile lab", cluster(containers={"runtime": runtime}))
    found = list(findings(profile, slurm.detect(run), run, on_path("srun")))
    assert one(found, runtime).verdict == verdict


def test_pbs_requeues_nothing_by_itself() -> None:
    run = pbs_site()
    profile = Profile("profile pbs", cluster(scheduler="pbs", resume="rerun", slots_per_node=4, cpus_per_slot=1))
    found = list(findings(profile, pbs.detect(run), run, everything))
    assert one(found, "resume: rerun", "requeue").verdict == "note"


@pytest.mark.parametrize(("jobs_submit", "way"), [(True, "successor"), (False, "chain")])
def test_what_auto_is_on_pbs(jobs_submit: bool, way: str) -> None:
    run = pbs_site()
    profile = Profile("profile pbs", cluster(scheduler="pbs", nodes_can_submit=jobs_submit, slots_per_node=4))
    found = list(findings(profile, pbs.detect(run), run, everything))
    assert one(found, "resume: auto", way)


def test_a_profile_of_another_site() -> None:
    run = pbs_site()
    found = list(findings(Profile("profile lab", cluster()), pbs.detect(run), run, everything))
    assert (found[-1].verdict, unnamed(found[-1].message, "Slurm")) == ("note", [])
    *_, named = findings(Profile("profile lab", cluster()), None, run, everything, is_named=True)
    assert (named.verdict, unnamed(named.message, "Slurm")) == ("problem", [])


def test_without_a_profile_a_job_of_the_default_pool_is_tried() -> None:
    run = slurm_site(LAB, sbatch=None)
    found = list(without_any(slurm.detect(run), run))
    assert one(found, "Invalid account").verdict == "problem"


def test_a_profile_with_mistakes_is_one_problem_and_all_its_mistakes(state_folder: Path) -> None:
    written(state_folder, "atlas", "name: atlas\nscheduler: slrum\nslots_per_node: 0\nslot_type: gpu\n")
    (found,) = read("atlas", os.environ, "slurm")
    assert isinstance(found, Finding)
    assert found.verdict == "problem"
    assert "cluster.scheduler" in found.message
    assert "cluster.slots_per_node" in found.message
    assert found.remedy.endswith("atlas.yaml")


def test_a_profile_that_is_no_yaml(state_folder: Path) -> None:
    written(state_folder, "atlas", "name: [")
    (found,) = read("atlas", os.environ, "slurm")
    assert isinstance(found, Finding)
    assert found.verdict == "problem"


def test_by_default_profiles_of_ones_own_are_read(state_folder: Path) -> None:
    written(state_folder, "atlas", "name: atlas\nscheduler: slurm\nslots_per_node: 4\nslot_type: gpu\n")
    assert [found.subject for found in read(None, os.environ, "slurm")] == ["profile atlas"]
    note = list(read(None, os.environ, "pbs"))[-1]
    assert isinstance(note, Finding)
    assert note.remedy == "hpc-det cluster detect --name NAME --write"


def test_the_profile_without_an_option_is_told_or_how_to_choose_one(state_folder: Path) -> None:
    assert default(os.environ) == Finding("profiles", "ok", "without --cluster: local (this machine)")
    written(state_folder, "atlas", "name: atlas\nscheduler: slurm\n")
    assert unnamed(default(os.environ).message, "atlas", state_folder / "conf" / "cluster" / "atlas.yaml") == []
    found = default({**os.environ, "HPC_DET_CLUSTER": "dawn"})
    assert (found.verdict, unnamed(found.message, "HPC_DET_CLUSTER", "'dawn'")) == ("note", [])


def test_a_name_that_nobody_has_is_refused() -> None:
    with refused(UsageError, "cluster", "'atlas'"):
        list(read("atlas", os.environ, None))
