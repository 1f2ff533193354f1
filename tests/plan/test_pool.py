from __future__ import annotations

from typing import Any

import pytest

from hpc_det.plan.container import container_notes
from hpc_det.plan.pool import cluster_notes, pool_notes, pool_problems, save_notes
from hpc_det.store.save_times import SaveTimes, after_save
from tests.checkpoint.saved import save
from tests.facts import each_names, unnamed
from tests.plan.sites import cluster, experiment

POOLS = {"low": {"max_time_limit": "01:00:00"}, "high": {"slot_type": "cpu"}}
MOUNT = {"host_path": "/data/digits", "container_path": "/digits"}


def problems(site: dict[str, Any] | None = None, **settings: Any) -> list[str]:
    return pool_problems(experiment(**settings), cluster(**(site or {})))


def test_an_unknown_pool_is_told_with_the_known_ones() -> None:
    each_names(
        problems({"pools": POOLS}, resources={"resource_pool": "lo"}),
        ["resources.resource_pool", "'atlas'", "'lo'", "high", "low"],
    )


def test_a_profile_without_pools_takes_any_name() -> None:
    assert problems(resources={"resource_pool": "anything"}) == []


@pytest.mark.parametrize(("limit", "fits"), [("00:59:00", True), ("01:00:00", True), ("01:00:01", False)])
def test_a_time_limit_may_be_as_long_as_the_pools(limit: str, fits: bool) -> None:
    found = problems({"pools": POOLS}, resources={"resource_pool": "low", "time_limit": limit})
    assert (found == []) is fits
    if not fits:
        each_names(found, ["resources.time_limit", repr(limit), 61, "'low'", "'atlas'", "'01:00:00'", 60])


@pytest.mark.parametrize(
    ("runtime", "settings", "facts"),
    [
        (None, {"environment": {"image": "a"}}, ["'a'", "'atlas'"]),
        ("podman", {"environment": {"image": "torch.sif"}}, ["environment.image", "'torch.sif'"]),
        (
            "apptainer",
            {"environment": {"image": "a"}, "bind_mounts": [MOUNT | {"propagation": "rshared"}]},
            ["bind_mounts[0].propagation", "apptainer", "'rshared'"],
        ),
        (
            "podman",
            {"environment": {"image": "a"}, "bind_mounts": [MOUNT | {"container_path": "/a:b"}]},
            ["bind_mounts[0]", "'/a:b'", "':'"],
        ),
    ],
)
def test_a_container_that_cannot_be(runtime: str | None, settings: dict[str, Any], facts: list[str]) -> None:
    (problem,) = problems({"containers": {"runtime": runtime}}, **settings)
    assert not unnamed(problem, *facts)


@pytest.mark.parametrize("image", ["determinedai/environments:py-3.8-pytorch-1.10", "determinedai/pytorch-ngc:0.38.1"])
def test_determineds_default_image_is_no_reason_to_refuse_a_cluster_without_containers(image: str) -> None:
    asked, site = experiment(environment={"image": image}), cluster(containers={"runtime": None})
    each_names(container_notes(asked, site), ["environment.image", repr(image), "'atlas'"])
    assert pool_problems(asked, site) == []
    each_names(problems({"containers": {"runtime": None}}, environment={"image": "determinedai/gpt-neox:1"}), ["image"])


def test_pyxis_is_of_slurm_alone_and_needs_to_know_the_scratch_folder() -> None:
    site = {"containers": {"runtime": "pyxis"}, "scratch": "$TMP"}
    found = problems({"scheduler": "local", **site}, environment={"image": "a"})
    assert [line.partition(":")[0] for line in found] == ["cluster.containers.runtime", "cluster.scratch"]
    assert problems({**site, "scratch": "/scratch/$USER"}, environment={"image": "a"}) == []


def test_a_mount_with_two_paths_is_accepted_without_a_container_and_noted() -> None:
    found = container_notes(experiment(bind_mounts=[MOUNT]), cluster())
    each_names(found, ["bind_mounts[0]", "'/data/digits'", "'/digits'", "environment.image"])
    assert problems(bind_mounts=[MOUNT]) == []


def test_a_mount_that_every_rank_sees_anyway_needs_no_container() -> None:
    asked = experiment(bind_mounts=[MOUNT | {"container_path": "/data/digits/"}])
    assert list(container_notes(asked, cluster())) == pool_problems(asked, cluster()) == []


@pytest.mark.parametrize(
    ("mode", "grace", "noted"),
    [("requeue", 0, True), ("cancel", 0, True), ("requeue", 30, False), ("off", 0, False), ("requeue", None, False)],
)
def test_a_preemption_without_grace_is_noted(mode: str, grace: int | None, noted: bool) -> None:
    site = cluster(preempt_mode=mode, grace_time_s=grace)
    assert bool(cluster_notes(site, None)) is noted


def save_of(seconds: float) -> SaveTimes:
    return after_save(None, save(seconds))


@pytest.mark.parametrize(
    ("mode", "grace", "took_s", "noted"),
    [
        ("requeue", 30, 31, True),
        ("cancel", 30, 31, True),
        ("requeue", 30, 29, False),
        ("off", 30, 31, False),
        ("requeue", None, 31, False),
        ("requeue", 30, None, False),
    ],
)
def test_a_grace_time_shorter_than_a_save_of_the_former_experiment_is_noted(
    mode: str, grace: int | None, took_s: float | None, noted: bool
) -> None:
    site, times = cluster(preempt_mode=mode, grace_time_s=grace), save_of(took_s) if took_s else None
    expected = [["'atlas'", 30, 12, 31, "checkpoint_interval: auto", "min_checkpoint_period"]] * noted
    each_names(save_notes(experiment(checkpoint_interval="none"), site, 12, times), *expected)
    assert save_notes(experiment(), site, 12, times) == []


@pytest.mark.parametrize(("mode", "known"), [("requeue", 0), ("cancel", 0), ("off", None), ("suspend", None)])
def test_only_a_pool_that_preempts_has_a_grace_time(mode: str, known: int | None) -> None:
    assert cluster(preempt_mode=mode, grace_time_s=0).preemption_grace_s == known


@pytest.mark.parametrize(
    ("runtime", "image", "facts"),
    [
        ("podman", None, ["resources.shm_size"]),
        ("apptainer", "a", ["resources.shm_size", "apptainer"]),
        ("podman", "a", None),
    ],
)
def test_a_size_of_shared_memory_that_nobody_can_set_is_noted(
    runtime: str, image: str | None, facts: list[object] | None
) -> None:
    asked = experiment(environment={"image": image}, resources={"shm_size": "4 GiB"})
    notes = pool_notes(asked, cluster(containers={"runtime": runtime}))
    each_names(notes, *([facts] if facts else []))


def test_an_image_for_other_slots_is_noted() -> None:
    asked = experiment(environment={"image": {"cuda": "a"}})
    (note,) = pool_notes(asked, cluster(slot_type="cpu", containers={"runtime": "podman"}))
    assert not unnamed(note, "environment.image", "cpu")


def test_a_quality_of_service_is_nothing_that_pbs_knows() -> None:
    assert pool_problems(experiment(), cluster(qos="high")) == []
    (problem,) = pool_problems(experiment(), cluster(scheduler="pbs", qos="high"))
    assert not unnamed(problem, "cluster.qos", "PBS", "'atlas'", "'high'")
