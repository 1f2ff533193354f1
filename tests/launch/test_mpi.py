"""One world over all nodes of a gang, with the mpiruns on this machine. Each node is an agent process here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_det.launch.mpi import mpirun_command
from hpc_det.node.process import STOP_SIGNALS, descendants
from hpc_det.store.attempt import Failure, first_failure
from tests.facts import unnamed
from tests.launch import mpiruns
from tests.launch.gang import Gang, children, is_there
from tests.store.test_attempt import ATTEMPT
from tests.wait import DEADLINE_S

pytestmark = pytest.mark.integration

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


@pytest.fixture(params=["mpich", "open_mpi"])
def mpirun(request: pytest.FixtureRequest) -> str:
    return mpiruns.mpirun(request.param)


def run(gang: Gang, mpirun: str, words: str, nodes: int = 1, **changes: object) -> list[int]:
    """Start the agents and return their exit codes."""
    return [agent.wait(timeout=DEADLINE_S) for agent in start(gang, mpirun, words, nodes, **changes)]


def start(gang: Gang, mpirun: str, words: str, nodes: int = 1, **changes: object) -> list[subprocess.Popen[bytes]]:
    # For Open MPI's shared memory, two "nodes" with the same host name are one node.
    one_host = f"--mca btl self,tcp {'' if ' -- ' in f' {words} ' else '-- '}" if "openmpi" in mpirun else ""
    entrypoint = f"exec $PYTHON -m {MODULE} {one_host}{words}"
    gang.plan(entrypoint, scheduler="slurm", nodes=nodes, ranks_per_node=2, mpi_launcher=(mpirun,), **changes)
    return [gang.start_agent(SLURM_NODEID=str(node)) for node in range(nodes)]


def command_line(tmp_path: Path, version: str) -> str:
    """Return the command line before the rank's command, for an mpirun that reports this version."""
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(f"#!/bin/sh\necho '{version}'\n")
    mpirun.chmod(0o700)
    words = mpirun_command([str(mpirun)], ATTEMPT, ["--verbose"], "/tmp/x/on-node")
    return " ".join(words).replace(str(tmp_path), "/opt/mpi").replace(str(tmp_path.parent), "/opt")


def test_open_mpi_4_is_told_nodes_that_nobody_looks_up_and_who_starts_its_daemons_there(tmp_path: Path) -> None:
    assert command_line(tmp_path, "mpirun (Open MPI) 4.1.4") == (
        "/opt/mpi/mpirun --mca plm rsh --mca plm_rsh_agent /bin/sh /tmp/x/on-node --mca plm_rsh_no_tree_spawn 1 "
        "--mca ras ^slurm,tm,pbs,lsf,gridengine,alps --mca orte_leave_session_attached 1 "
        "--host localhost:4,198.18.0.1:4 -n 8 --map-by ppr:4:node:oversubscribe --bind-to none --verbose "
        "env MPI4PY_LIBMPI=/opt/lib/libmpi.so.40:/opt/lib64/libmpi.so.40:libmpi.so.40"
    )


def test_open_mpi_5_has_other_names_for_the_same(tmp_path: Path) -> None:
    assert command_line(tmp_path, "mpirun (Open MPI) 5.0.11") == (
        "/opt/mpi/mpirun --prtemca plm ssh --prtemca plm_ssh_agent /bin/sh /tmp/x/on-node "
        "--prtemca plm_ssh_no_tree_spawn 1 --prtemca ras ^slurm,tm,pbs,lsf,gridengine,alps --leave-session-attached "
        "--host localhost:4,198.18.0.1:4 -n 8 --map-by ppr:4:node:oversubscribe --bind-to none --verbose "
        "env MPI4PY_LIBMPI=/opt/lib/libmpi.so.40:/opt/lib64/libmpi.so.40:libmpi.so.40"
    )


def test_mpich_leaves_the_environment_of_each_node_alone(tmp_path: Path) -> None:
    assert command_line(tmp_path, "HYDRA build details:") == (
        "/opt/mpi/mpirun -launcher ssh -launcher-exec /tmp/x/on-node -rmk user -localhost 10.0.0.7 "
        "-disable-hostname-propagation -hosts localhost,198.18.0.1 -ppn 4 -n 8 -genvnone --verbose "
        "env MPI4PY_LIBMPI=/opt/lib/libmpi.so.12:/opt/lib64/libmpi.so.12:libmpi.so.12"
    )


def failure(gang: Gang) -> Failure:
    found = first_failure(gang.trial, 1)
    assert found is not None, gang.printed.read_text()
    return found


def test_ranks_of_two_nodes_make_one_world_and_each_belongs_to_its_own_node(gang: Gang, mpirun: str) -> None:
    (gang.code / "speak.py").write_text(SPEAKS)
    assert run(gang, mpirun, "speak.py --lr 1", nodes=2) == [0, 0], gang.printed.read_text()
    spoken, _, ports = zip(
        *(line.rpartition(" ") for line in (gang.code / "world").read_text().splitlines()), strict=True
    )
    assert spoken == ("0 4 0 2 0 --lr 1", "1 4 1 2 0 --lr 1", "2 4 0 2 1 --lr 1", "3 4 1 2 1 --lr 1")
    assert len(set(ports)) == 1


FAILS = """
import os, sys
from mpi4py import MPI

MPI.COMM_WORLD.Barrier()
if MPI.COMM_WORLD.rank == 3:
    {how}
MPI.COMM_WORLD.Barrier()
"""


RAISES = "raise ValueError('the sky has fallen')"
IS_KILLED = "os.kill(os.getppid(), 19); os.kill(os.getpid(), 9)"
"""Stops mpirun's process on the node first: mpirun could end the other ranks before this node's agent reports."""


@pytest.mark.parametrize(
    ("vendor", "how", "fact", "lost"),
    [
        ("mpich", "sys.exit(7)", "exit code 7", False),
        pytest.param("mpich", RAISES, "ValueError: the sky has fallen", False, marks=pytest.mark.long),
        ("mpich", IS_KILLED, "process", True),
        ("open_mpi", RAISES, "ValueError: the sky has fallen", False),
    ],
)
def test_a_rank_that_fails_is_named_and_ends_all_others(
    gang: Gang, vendor: str, how: str, fact: str, lost: bool
) -> None:
    (gang.code / "fail.py").write_text(FAILS.format(how=how))
    assert run(gang, mpiruns.mpirun(vendor), "fail.py", nodes=2) == [1, 1]
    found = failure(gang)
    assert (found.rank, found.lost) == (3, lost)
    assert unnamed(found.message, fact) == []
    assert ("fail.py" in found.traceback) is (how == RAISES)


def test_a_world_of_another_size_than_the_plans_is_refused_with_both_numbers(gang: Gang) -> None:
    (gang.code / "speak.py").write_text(SPEAKS)
    assert run(gang, mpiruns.open_mpi(), "-n 1 -- speak.py") == [1]
    assert unnamed(failure(gang).message, "1 rank", 2, "(1 node x 2)", "MPI library") == []
    assert failure(gang).user_error
    assert not (gang.code / "world").exists()


def test_a_library_of_another_vendor_than_mpiruns_does_not_train_twice_alone(gang: Gang) -> None:
    (gang.code / "speak.py").write_text(SPEAKS)
    environment = (f"PYTHON={sys.executable}", "MPI4PY_LIBMPI=libmpi.so.40")
    assert run(gang, mpiruns.MPICH, "speak.py", environment=environment) == [1]
    assert unnamed(failure(gang).message, "1 rank", 2, "MPI library", "Open MPI") == []
    assert not (gang.code / "world").exists()


def test_a_command_gets_its_numbers_without_mpi4py(gang: Gang, mpirun: str) -> None:
    shows = "sh -c 'echo $RANK/$WORLD_SIZE/$LOCAL_RANK/$LOCAL_WORLD_SIZE >$RANK.told'"
    assert run(gang, mpirun, shows) == [0], gang.printed.read_text()
    assert [(gang.code / f"{rank}.told").read_text() for rank in (0, 1)] == ["0/2/0/2\n", "1/2/1/2\n"]


@pytest.mark.parametrize(
    ("launcher", "facts"),
    [
        ("mpirun-of-nobody", ["cluster.mpi_launcher: ", "mpirun-of-nobody"]),
        ("true", ["Open MPI", "MPICH"]),
        ("srun-of-nobody", ["srun-of-nobody"]),
    ],
)
def test_an_mpirun_that_is_not_there_or_a_stranger_is_named_with_the_remedy(
    gang: Gang, launcher: str, facts: list[str]
) -> None:
    assert run(gang, launcher, "speak.py", nodes=2) == [1, 1]
    assert unnamed(failure(gang).message, *facts) == []
    assert failure(gang).user_error


WAITS = """
import os, sys
from mpi4py import MPI

rank = MPI.COMM_WORLD.rank
sys.argv[1:] = [str(rank)]
exec(open("rank.py").read())
"""


def test_the_schedulers_signals_do_not_touch_mpirun_and_the_bell_reaches_all_ranks(gang: Gang, mpirun: str) -> None:
    (gang.code / "waits.py").write_text(WAITS)
    agents = start(gang, mpirun, "waits.py", nodes=2)
    ranks = gang.wait_for_ranks(0, 1, 2, 3)
    below = {pid for agent in agents for pid in descendants(agent.pid)}
    for number in STOP_SIGNALS:
        for pid in below.difference(ranks):
            os.kill(pid, number)
    agents[1].send_signal(signal.SIGTERM)
    assert [agent.wait(timeout=DEADLINE_S) for agent in agents] == [0, 0], gang.printed.read_text()
    assert gang.saved() == dict.fromkeys("0123", "signal")


def test_ranks_of_a_gang_whose_mpirun_is_killed_are_gone_with_it(gang: Gang, mpirun: str) -> None:
    (gang.code / "waits.py").write_text(WAITS)
    agents = start(gang, mpirun, "waits.py", nodes=2)
    ranks = gang.wait_for_ranks(0, 1, 2, 3)
    (launcher,) = filter(children, children(agents[0].pid))  # the guardian has no children
    os.kill(children(launcher)[0], signal.SIGKILL)
    assert [agent.wait(timeout=DEADLINE_S) for agent in agents] == [1, 1]
    assert not any(map(is_there, ranks))
