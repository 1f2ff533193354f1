"""Detection of a Slurm site. The recordings follow Slurm's manual pages and the shape of two real sites."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_det.schedulers.scheduler import CommandError
from hpc_det.schedulers.site import FoundPool, Site
from hpc_det.schedulers.slurm.detect import detect, parse_config, parse_gres, parse_partitions, parse_sinfo, site_of
from tests.facts import refused, unnamed
from tests.schedulers.recorded_sites import SLURM, replay, said


def pools(site: Site) -> dict[str, FoundPool]:
    return {pool.name: pool for pool in site.pools}


def atlas(**config: str) -> Site:
    """Return the larger recorded site, with these settings of Slurm."""
    folder = "slurm-24.05"
    return site_of(
        parse_config(said(folder, "config.txt")) | config,
        parse_sinfo(said(folder, "sinfo.txt")),
        parse_partitions(said(folder, "partitions.txt")),
        has_pyxis=False,
    )


def test_a_small_site_with_two_tiers() -> None:
    site = detect(replay("slurm-22.05", SLURM))
    assert (site.name, site.version, site.max_array_size, site.gpu_flag) == (
        "lab",
        "Slurm 22.05.8",
        10001,
        "gpus-per-node",
    )
    nodes: dict[str, Any] = {"slots_per_node": 2, "slot_type": "gpu", "cpus_per_slot": 4, "max_nodes": 3}
    nodes["max_cpus_per_node"] = 8
    assert site.pools == (
        FoundPool(name="low", default=True, preempt_mode="requeue", grace_time_s=30, **nodes),
        FoundPool(name="high", preempt_mode="off", grace_time_s=0, **nodes),
    )
    assert site.usual.name == "low"


def test_of_nodes_that_differ_the_most_common_ones_with_gpus_are_taken() -> None:
    gpu = pools(atlas())["gpu"]
    assert (gpu.slots_per_node, gpu.gpu_type, gpu.cpus_per_slot) == (4, "a100", 16)
    assert gpu.max_cpus_per_node == 64
    assert gpu.max_nodes == 8  # limited by MaxNodes; there are 12 such nodes
    assert not unnamed(gpu.remark, 12, 64, "4 a100", 4, 96, "8 h100")
    assert pools(atlas())["scavenge"].max_nodes == 12


def test_without_gpus_a_slot_is_a_cpu() -> None:
    compute = pools(atlas())["compute"]
    assert (compute.slot_type, compute.slots_per_node, compute.cpus_per_slot) == ("cpu", 128, 1)
    assert (compute.default, compute.max_time_limit) == (True, "3-00:00:00")


def test_a_partition_without_nodes_is_no_pool() -> None:
    assert list(pools(atlas())) == ["gpu", "scavenge", "mig", "compute"]


@pytest.mark.parametrize(
    ("config", "gpu", "scavenge"),
    [
        ({}, "off", "requeue"),
        ({"PreemptType": "preempt/none", "PreemptMode": "OFF"}, "off", "off"),
        ({"PreemptType": "(null)"}, "off", "off"),
        ({"PreemptType": "preempt/qos", "PreemptMode": "CANCEL"}, "cancel", "cancel"),
        ({"PreemptType": "preempt/qos", "PreemptMode": "SUSPEND,GANG"}, "suspend", "suspend"),
    ],
)
def test_who_is_preempted_and_how(config: dict[str, str], gpu: str, scavenge: str) -> None:
    found = pools(atlas(**config))
    assert (found["gpu"].preempt_mode, found["scavenge"].preempt_mode) == (gpu, scavenge)


@pytest.mark.parametrize(
    ("config", "flag", "facts"),
    [
        ({}, "gpus-per-node", ["gres"]),
        ({"SelectType": "select/cons_res"}, "gres", ["select/cons_res", "--gpus-per-node"]),
        ({"SelectType": "select/linear"}, "gres", ["select/linear", "--gpus-per-node"]),
        ({"SLURM_VERSION": "18.08.9"}, "gres", ["Slurm 18.08.9", "--gpus-per-node"]),
        ({"SLURM_VERSION": "20.11.0-rc1"}, "gpus-per-node", ["gres"]),
    ],
)
def test_how_gpus_are_asked_for_follows_from_version_and_plugin(
    config: dict[str, str], flag: str, facts: list[str]
) -> None:
    site = atlas(**config)
    assert site.gpu_flag == flag
    assert not unnamed(site.gpu_flag_why, *facts)


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("(null)", {}),
        ("gpu:4", {"": 4}),
        ("gpu:a100:4(S:0-1)", {"a100": 4}),
        ("gpu:tesla:2,gpu:kepler:2,mps:400", {"tesla": 2, "kepler": 2}),
        ("craynetwork:4,gpu:a100_1g.10gb:7(S:0)", {"a100_1g.10gb": 7}),
        ("gpu(S:0):2", {}),
        ("license:2", {}),
    ],
)
def test_gpus_of_a_node(gres: str, gpus: dict[str, int]) -> None:
    assert parse_gres(gres) == gpus


def test_pyxis_shows_in_the_help_of_srun() -> None:
    with_pyxis = replay("slurm-22.05", SLURM, srun="      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH")
    assert detect(with_pyxis).runtime == "pyxis"
    assert detect(replay("slurm-22.05", SLURM)).runtime is None


def test_a_site_where_nobody_may_run_is_an_error() -> None:
    with refused(CommandError, "sinfo"):
        detect(replay("slurm-22.05", SLURM, sinfo=""))


def test_a_slurm_that_does_not_answer_is_an_error() -> None:
    with refused(CommandError, "scontrol"):
        detect(replay("slurm-22.05", {}))


@pytest.mark.parametrize("file", SLURM.values())
def test_an_answer_that_ends_within_a_line_is_an_error(file: str) -> None:
    """Otherwise a node with 16 GPUs could be taken for a node with 1."""
    (command,) = (command for command in SLURM if SLURM[command] == file)
    whole = replay("slurm-24.05", SLURM)
    with refused(CommandError, command[0]):
        detect(lambda asked: whole(asked)[:-2] if tuple(asked) == command else whole(asked))
