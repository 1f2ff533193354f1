"""The profile that detection writes, and the choice of the scheduler."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hpc_det.config.cluster import Cluster
from hpc_det.config.plain_yaml import parse_yaml
from hpc_det.errors import UsageError
from hpc_det.schedulers.scheduler import CommandError, Run
from hpc_det.schedulers.site import FoundPool, Site, ask, starters, to_yaml, why_not_mpiexec
from tests.facts import refused
from tests.schedulers.recorded_sites import PBS, SLURM, replay


def only(*commands: str) -> Callable[[str], str | None]:
    return lambda name: f"/usr/bin/{name}" if name in commands else None


def absent(command: object) -> str:
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
            assert value == getattr(pool, name, None)  # limits are the site's to decide
    assert profile.in_pool(None).slots_per_node == (site.usual.slots_per_node or 1)
    assert profile.max_array_size == (site.max_array_size or 1001)
    assert profile.containers.runtime == site.runtime


def test_the_best_way_to_start_agents_on_pbs_is_taken() -> None:
    assert SITES[2].start_agents_with == "pbs_tmrsh"
    found = Cluster.model_validate(parse_yaml(to_yaml(SITES[2], "mine"), "mine.yaml"))
    assert found.start_agents_with == "pbs_tmrsh"
    assert "srun" not in to_yaml(SITES[2], "mine")


HYDRA = "HYDRA build details:\n    Launchers available:    ssh rsh fork slurm manual persist\n"


@pytest.mark.parametrize(
    ("version", "info", "is_offered"),
    [
        (HYDRA, "", False),
        (HYDRA.replace("slurm", "slurm pbs"), "", True),
        ("mpiexec (OpenRTE) 4.1.4\n", "   MCA plm: slurm (MCA v2.1.0)\n   MCA ras: slurm (MCA v2.1.0)\n", False),
        ("mpiexec (OpenRTE) 4.1.4\n", "   MCA plm: slurm (MCA v2.1.0)\n   MCA plm: tm (MCA v2.1.0)\n", True),
        ("PALS mpiexec version 1.2.12\n", "", True),
    ],
)
def test_an_mpiexec_starts_agents_only_where_it_was_built_for_pbs(version: str, info: str, is_offered: bool) -> None:
    answers = {"/usr/bin/mpiexec": version, "/usr/bin/ompi_info": info}
    site = ask(replay("pbs-23.06", PBS, **answers), only("pbsnodes", "mpiexec"))
    assert site.start_agents_with == ("mpiexec" if is_offered else None)


def test_an_mpiexec_of_this_python_environment_starts_no_agents() -> None:
    def which(name: str) -> str | None:
        return str(Path(sys.prefix, "bin", name)) if name == "mpiexec" else None

    assert starters(absent, which) == []
    assert sys.prefix in why_not_mpiexec(absent, which)


def both(command: Sequence[str]) -> str:
    """Answer like a login node with both Slurm and PBS."""
    kind, folder = (PBS, "pbs-23.06") if command[0] in ("pbsnodes", "qstat", "qmgr") else (SLURM, "slurm-22.05")
    return replay(folder, kind, srun="")(command)


def test_of_two_schedulers_the_chosen_one_is_asked() -> None:
    here = only("sinfo", "pbsnodes", "pbsdsh")
    found = [ask(both, here, chosen).scheduler for chosen in (None, "slurm", "pbs")]
    assert found == ["slurm", "slurm", "pbs"]
    with refused(UsageError, "--scheduler pbs", "pbsnodes", "PATH"):
        ask(both, only("sinfo"), "pbs")


def test_the_whole_text() -> None:
    assert to_yaml(SITES[3], "odd").startswith(
        """\
# Written by `hpc-det cluster detect` from the answers of Slurm 24.05. Check and complete it.
name: "odd"
scheduler: slurm

# Nodes: those of 'on', the first pool.
slots_per_node: 1
slot_type: cpu
cpus_per_slot: 1

# Settings of each pool. `default: true` marks the pool of jobs that name none.
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


def down(command: Sequence[str]) -> str:
    raise CommandError(f"{command[0]}: refused")


def test_of_a_slurm_that_is_not_there_only_the_commands_may_be_left() -> None:
    pbs = replay("pbs-23.06", PBS)
    site = ask(lambda command: down(command) if command[0] == "scontrol" else pbs(command), only("sinfo", "pbsnodes"))
    assert site.scheduler == "pbs"


def test_if_no_scheduler_answers_the_errors_of_all_are_shown() -> None:
    with refused(CommandError, "scontrol: refused", "pbsnodes: refused"):
        ask(down, only("sinfo", "pbsnodes"))


def test_a_machine_without_a_scheduler_is_told_what_to_do() -> None:
    run: Run = absent
    with refused(UsageError, "Slurm", "PBS", "PATH", "login node"):
        ask(run, only("apptainer"))
