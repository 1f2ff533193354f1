"""One world over all nodes of a gang, by the mpiruns that are on this machine. Nodes are agents beside each other."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_det.launch.failure import Failure, first_failure
from tests.launch.gang import Gang, wait_for

MODULE = "hpc_det.launch.mpi"
SPEAKS = """
import os, sys
from mpi4py import MPI

world = MPI.COMM_WORLD
told = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "HPC_DET_NODE_RANK")]
assert [world.rank, world.size] == list(map(int, told[:2]))
everybody = world.gather(" ".join([*told, *sys.argv[1:], os.environ["MASTER_PORT"]]))
if world.rank == 0:
    with open("world", "w") as file:
        file.write("\\n".join(everybody))
"""


def mpiruns() -> dict[str, str]:
    """Vendor -> command."""
    beside = Path(sys.executable).with_name("mpiexec.hydra")
    found = {"mpich": str(beside) if beside.exists() else None, "open_mpi": shutil.which("mpirun.openmpi")}
    return {vendor: path for vendor, path in found.items() if path}


@pytest.fixture(params=["mpich", "open_mpi"])
def vendor(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def mpirun(vendor: str) -> str:
    return mpiruns()[vendor]


def run(gang: Gang, mpirun: str, words: str, nodes: int = 1, **changes: object) -> list[int]:
    """The exit codes of the agents."""
    one_host = f"--mca btl self,tcp {'' if ' -- ' in f' {words} ' else '-- '}" if "openmpi" in mpirun else ""
    entrypoint = f"exec $PYTHON -m {MODULE} {one_host}{words}"
    gang.plan(entrypoint, scheduler="slurm", nodes=nodes, ranks_per_node=2, mpi_launcher=(mpirun,), **changes)
    agents = [gang.start_agent(SLURM_NODEID=str(node)) for node in range(nodes)]
    return [agent.wait(timeout=40) for agent in agents]


def failure(gang: Gang) -> Failure:
    found = first_failure(gang.trial, 1)
    assert found is not None, gang.printed.read_text()
    return found


def test_ranks_of_two_nodes_make_one_world_and_each_belongs_to_its_own_node(gang: Gang, mpirun: str) -> None:
    (gang.code / "speak.py").write_text(SPEAKS)
    assert run(gang, mpirun, "speak.py --lr 1", nodes=2) == [0, 0], gang.printed.read_text()
    *told, port = zip(*(line.rsplit(" ", 1) for line in (gang.code / "world").read_text().splitlines()))
    assert told == [("0 4 0 2 0 --lr 1", "1 4 1 2 0 --lr 1", "2 4 0 2 1 --lr 1", "3 4 1 2 1 --lr 1")]
    assert len(set(port)) == 1
