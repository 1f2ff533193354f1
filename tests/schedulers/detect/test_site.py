"""The profile that a detection writes, and which scheduler is asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from hpc_det.config.cluster import Cluster
from hpc_det.config.plain_yaml import parse_yaml
from hpc_det.errors import UsageError
from hpc_det.schedulers.command import CommandError, Run
from hpc_det.schedulers.detect.ask import ask
from hpc_det.schedulers.detect.site import FoundPool, Site, to_yaml
from tests.schedulers.detect.recorded import PBS, SLURM, replay


def only(*commands: str) -> Callable[[str], str | None]:
    return lambda name: f"/usr/bin/{name}" if name in commands else None


def refused(command: object) -> str:
    raise AssertionError(f"{command} was run")


SITES = [
    ask(replay("slurm-22.05", SLURM), only("sinfo")),
    ask(replay("slurm-24.05", SLURM, srun="--container-image"), only("sinfo", "apptainer")),
    ask(replay("pbs-23.06", PBS), only("pbsnodes", "pbs_tmrsh", "mpiexec")),
    Site(
        scheduler="slurm",
        version="Slurm 24.05",
        name="odd",
        max_array_size=None,
        pools=(FoundPool(name="on", slot_type="cpu", max_time_limit="1:30:00"), FoundPool(name='a "b": #c')),
    ),
]


@pytest.mark.parametrize("site", SITES, ids=lambda site: site.name)
def test_what_is_written_is_a_profile_that_says_what_was_found(site: Site) -> None:
    profile = Cluster.model_validate(parse_yaml(to_yaml(site, "mine"), "mine.yaml"))
    assert (profile.name, profile.scheduler) == ("mine", site.scheduler)
    assert list(profile.pools) == [pool.name for pool in site.pools]
    for pool in site.pools:
        for name, value in profile.pools[pool.name].model_dump(exclude={"default"}).items():
            assert value == getattr(pool, name)
    assert profile.in_pool(None).slots_per_node == (site.usual.slots_per_node or 1)
    assert profile.max_array_size == (site.max_array_size or 1001)
    assert profile.containers.runtime == site.runtime


def test_the_best_way_to_start_agents_on_pbs_is_taken() -> None:
    assert SITES[2].start_agents_with == "pbs_tmrsh"
    found = Cluster.model_validate(parse_yaml(to_yaml(SITES[2], "mine"), "mine.yaml"))
    assert found.start_agents_with == "pbs_tmrsh"
    assert "srun" not in to_yaml(SITES[2], "mine")


def test_the_whole_text() -> None:
    assert to_yaml(SITES[3], "odd").startswith(
        """\
# Written by `hpc-det cluster detect`, which asked Slurm 24.05. Check it, and complete it.
name: "odd"
scheduler: slurm

# Nodes: as in 'on', the first pool.
slots_per_node: 1
slot_type: cpu
cpus_per_slot: 1

# What each pool has of its own. `default` is where jobs go that name none.
pools:
  "on":
    slot_type: "cpu"
    max_time_limit: "1:30:00"
  "a \\"b\\": #c": {}

containers:
"""
    )


def test_a_grace_time_of_zero_is_said() -> None:
    assert "grace_time_s: 0" in to_yaml(SITES[1], "atlas")


@pytest.mark.parametrize(
    ("commands", "runtime"), [(("apptainer", "podman"), "apptainer"), (("podman",), "podman"), ((), None)]
)
def test_a_runtime_on_path_is_taken(commands: tuple[str, ...], runtime: str | None) -> None:
    assert ask(replay("slurm-22.05", SLURM), only("sinfo", *commands)).runtime == runtime


def test_slurm_comes_first() -> None:
    assert ask(replay("slurm-22.05", SLURM), only("sinfo", "pbsnodes")).scheduler == "slurm"


def test_commands_of_slurm_without_a_slurm_do_not_hide_a_pbs() -> None:
    pbs = replay("pbs-23.06", PBS)

    def run(command: Sequence[str]) -> str:
        if command[0] in ("sinfo", "scontrol"):
            raise CommandError(f"{command[0]}: Could not establish a configuration source")
        return pbs(command)

    assert ask(run, only("sinfo", "pbsnodes")).scheduler == "pbs"
    with pytest.raises(CommandError, match="configuration source"):
        ask(run, only("sinfo"))


def test_a_machine_without_a_scheduler_is_told_what_to_do() -> None:
    run: Run = refused
    with pytest.raises(UsageError, match=r"neither Slurm .* nor PBS .* is on PATH; run it on a login node"):
        ask(run, only("apptainer"))
