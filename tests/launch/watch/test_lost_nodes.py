"""Lost nodes in every phase of an attempt: two real agents with ranks without torch, on two networks."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpc_det.store.attempt import Failure, failures, first_failure, request_stop
from tests.labs import networks
from tests.labs.networks import Networks
from tests.launch.gang import Gang, is_there
from tests.wait import DEADLINE_S, wait_for

pytestmark = pytest.mark.integration

SOON_S = 3
"""Seconds after which these agents take a silent node for lost, instead of 15."""
SHORTER = f"import hpc_det.launch.watch.peers as peers\npeers.LOST_S = {SOON_S}\n"


class TwoNodes:
    def __init__(self, gang: Gang, lines: Networks, folder: Path) -> None:
        self.gang = gang
        self.lines = lines
        (folder / "sitecustomize.py").write_text(SHORTER)
        self._path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        self.agents: list[subprocess.Popen[bytes]] = []

    def start(self, entrypoint: str, nodes: tuple[int, ...] = (0, 1)) -> None:
        self.gang.plan(entrypoint, scheduler="slurm", nodes=2, ranks_per_node=1, network_interface="eth0")
        for node in nodes:
            through = self.lines.through(node)
            self.agents.append(self.gang.start_agent(through=through, SLURM_NODEID=str(node), PYTHONPATH=self._path))

    def code(self, node: int) -> int:
        return self.agents[node].wait(DEADLINE_S)

    def verdict(self) -> Failure:
        found = first_failure(self.gang.trial, 1)
        assert found is not None, self.gang.printed.read_text()
        return found


@pytest.fixture
def two_nodes(gang: Gang, tmp_path: Path) -> Iterator[TwoNodes]:
    if reason := networks.available():
        pytest.skip(reason)
    lines = Networks(2)
    yield TwoNodes(gang, lines, tmp_path)
    gang.close()
    lines.close()


RANKS = "exec $PYTHON rank.py $HPC_DET_NODE_RANK"
DEAF = f"{RANKS} deaf"


def before_the_ranks_meet(nodes: TwoNodes) -> list[int]:
    """Return the processes before any rank exists, as with a torchrun that waits for the second node."""
    nodes.start(
        "echo $$ >pid-$HPC_DET_NODE_RANK.part; mv pid-$HPC_DET_NODE_RANK.part pid-$HPC_DET_NODE_RANK; sleep 600"
    )
    files = [nodes.gang.code / f"pid-{node}" for node in (0, 1)]
    wait_for(lambda: all(file.exists() for file in files))
    return [int(file.read_text()) for file in files]


def in_training(nodes: TwoNodes) -> list[int]:
    nodes.start(DEAF)
    return nodes.gang.wait_for_ranks(0, 1)


def in_a_save(nodes: TwoNodes) -> list[int]:
    """Return the ranks, which were asked to stop and have not exited yet."""
    ranks = in_training(nodes)
    request_stop(nodes.gang.trial.stop, attempt=1, reason="pause", source="a test", deadline=None)
    time.sleep(1.5)  # agents look every second; the result is the same whether they have or not
    return ranks


def at_exit(nodes: TwoNodes) -> list[int]:
    """Return the rank of the second node; that of the first one has finished."""
    nodes.start(f"[ $HPC_DET_NODE_RANK = 1 ] && {DEAF}; exit 0")
    return nodes.gang.wait_for_ranks(1)


def cut(nodes: TwoNodes) -> None:
    nodes.lines.cut(1)


def powered_off(nodes: TwoNodes) -> None:
    nodes.lines.power_off(1)


PHASES = [before_the_ranks_meet, in_training, in_a_save, at_exit]
IN_A_HURRY = [(before_the_ranks_meet, powered_off), (in_training, cut)]


def cells() -> list[object]:
    every = [(phase, trouble) for phase in PHASES for trouble in (cut, powered_off)]
    marks = {cell: () if cell in IN_A_HURRY else (pytest.mark.long,) for cell in every}
    return [pytest.param(*cell, id=f"{cell[1].__name__}-{cell[0].__name__}", marks=marks[cell]) for cell in every]


@pytest.mark.parametrize(("phase", "trouble"), cells())
def test_a_lost_node_ends_the_gang_in_seconds_and_is_named(
    two_nodes: TwoNodes, phase: Callable[[TwoNodes], list[int]], trouble: Callable[[TwoNodes], None]
) -> None:
    ranks = phase(two_nodes)
    began = time.monotonic()
    trouble(two_nodes)
    assert two_nodes.code(0) == 1
    assert time.monotonic() - began < 10 * SOON_S
    found = two_nodes.verdict()
    assert (found.host, found.node_lost, found.rank) == ("node2", True, None)
    two_nodes.code(1)  # node 1 is cut off from node 0 as well
    wait_for(lambda: not any(is_there(rank) for rank in ranks))
    assert [failure.host for failure in failures(two_nodes.gang.trial, 1)] == ["node2"]


def test_where_node_0_is_lost_the_others_end_their_ranks_and_blame_nobody(two_nodes: TwoNodes) -> None:
    (_, other) = in_training(two_nodes)
    two_nodes.lines.power_off(0)
    assert two_nodes.code(1) == 1
    wait_for(lambda: not is_there(other))
    assert failures(two_nodes.gang.trial, 1) == []


def test_a_gang_that_was_suspended_goes_on(two_nodes: TwoNodes) -> None:
    """The agents are suspended at different moments, and for longer than the limit for a lost node."""
    in_training(two_nodes)
    for agent in two_nodes.agents:
        agent.send_signal(signal.SIGSTOP)
        time.sleep(0.2)
    time.sleep(1.5 * SOON_S)
    for agent in two_nodes.agents:
        agent.send_signal(signal.SIGCONT)
        time.sleep(0.5 * SOON_S)
    assert [agent.poll() for agent in two_nodes.agents] == [None, None]
    assert failures(two_nodes.gang.trial, 1) == []


@pytest.mark.long
def test_a_network_that_is_gone_for_a_moment_loses_no_node(two_nodes: TwoNodes) -> None:
    in_training(two_nodes)
    two_nodes.lines.cut(1)
    time.sleep(SOON_S / 3)
    two_nodes.lines.mend(1)
    time.sleep(2 * SOON_S)
    assert [agent.poll() for agent in two_nodes.agents] == [None, None]
    assert failures(two_nodes.gang.trial, 1) == []
