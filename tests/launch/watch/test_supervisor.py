"""Agents as supervisors of their gang: two nodes are two real agents on this machine, with ranks without torch."""

from __future__ import annotations

import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpc_det.launch.watch import node_0 as supervision
from hpc_det.launch.watch import peers
from hpc_det.launch.watch.peers import key_of
from hpc_det.launch.watch.supervisor import SupervisedGang
from hpc_det.node import line_server
from hpc_det.node.agent_socket import AgentSocket
from hpc_det.node.json_files import read_json, read_map
from hpc_det.node.lines import Line, connect
from hpc_det.plan.job_plan import JobPlan
from hpc_det.store.attempt import (
    Failure,
    failure_now,
    failures,
    first_failure,
    note_failure,
    read_stop,
    request_stop,
)
from tests.facts import each_names, unnamed
from tests.launch.gang import Gang
from tests.launch.watch.suspension import Suspension
from tests.stub import Stub
from tests.wait import DEADLINE_S, wait_for

# Says hello, makes a few steps and then no more; `stuck` is the function in which rank 1 hangs.
RANK = """
import os, re, sys, time
from hpc_det.node.heartbeat import Heartbeat, Progress
from hpc_det.distributed.rank_process import join_gang

def waits_for_others():
    process.heartbeat.progress = progress
    time.sleep(3600)

def hangs():
    process.heartbeat.progress = progress
    time.sleep(3600)

def keeps_the_lock():
    process.heartbeat.progress = progress
    while len(asked) < 2:  # until it is known to train
        time.sleep(0.01)
    re.match("(a+)+$", "a" * 60 + "b")

asked = []

def progress():
    asked.append(True)
    return Progress("training", 7 + (rank == 0), warm=True, batch=7)

rank, stuck = int(sys.argv[1]), sys.argv[2]
process = join_gang({**os.environ, "RANK": str(rank)})
globals()[stuck]() if rank == 1 else waits_for_others()
"""


@pytest.fixture
def two_nodes(gang: Gang) -> Gang:
    (gang.code / "rank.py").write_text(RANK)
    return gang


def start_agents(
    gang: Gang, entrypoint: str, hang_timeout_s: int = 1, **of_node_1: str
) -> list[subprocess.Popen[bytes]]:
    gang.plan(entrypoint, scheduler="slurm", nodes=2, ranks_per_node=1, hang_timeout_s=hang_timeout_s)
    job = {"SLURM_JOB_NODELIST": "node[1-2]"}
    return [gang.start_agent(1, SLURM_NODEID=node, **job, **of) for node, of in (("0", {}), ("1", of_node_1))]


def verdict(gang: Gang) -> Failure:
    found = first_failure(gang.trial, 1)
    assert found is not None
    return found


# --- ranks that hang


@pytest.mark.integration
def test_ranks_that_hang_show_their_stacks_on_all_nodes_and_the_last_one_is_named(two_nodes: Gang) -> None:
    first, _ = start_agents(two_nodes, "exec $PYTHON rank.py $HPC_DET_NODE_RANK hangs")
    assert first.wait(timeout=DEADLINE_S) == 1
    found = verdict(two_nodes)
    assert (found.rank, found.host, found.hung) == (1, "node2", True)
    behind, ahead = (
        "rank 1: training, batch 7, hangs (rank.py:",
        "rank 0: training, batch 7, waits_for_others (rank.py:",
    )
    assert unnamed(found.message, behind, ahead) == []
    assert found.message.index(behind) < found.message.index(ahead)
    logs = [two_nodes.trial.rank_log(1, rank).read_text() for rank in (0, 1)]
    assert ["in hangs" in log for log in logs] == [False, True]
    assert ["in waits_for_others" in log for log in logs] == [True, False]


@pytest.mark.long
@pytest.mark.integration
def test_a_rank_whose_interpreter_is_locked_shows_its_stack_all_the_same(two_nodes: Gang) -> None:
    start_agents(two_nodes, "exec $PYTHON rank.py $HPC_DET_NODE_RANK keeps_the_lock", hang_timeout_s=4)
    wait_for(lambda: first_failure(two_nodes.trial, 1), DEADLINE_S)
    assert unnamed(verdict(two_nodes).message, "rank 1: training, batch 7, no answer") == []
    assert "in keeps_the_lock" in two_nodes.trial.rank_log(1, 1).read_text()


@pytest.mark.integration
def test_nobody_is_watched_where_the_limit_is_0(two_nodes: Gang) -> None:
    two_nodes.plan("$PYTHON rank.py 1 hangs & sleep 3", ranks_per_node=1, hang_timeout_s=0)
    assert two_nodes.start_agent().wait(timeout=DEADLINE_S) == 0


# --- unhealthy nodes


def a_late_clock(folder: Path) -> str:
    """Return a folder for PYTHONPATH with which the clock of every Python is an hour behind."""
    (folder / "sitecustomize.py").write_text("import time\nreal = time.time\ntime.time = lambda: real() - 3600\n")
    return str(folder)


@pytest.mark.integration
def test_an_ill_node_is_named_before_any_rank_trains_there(gang: Gang, tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, [a_late_clock(tmp_path), os.environ.get("PYTHONPATH")]))
    agents = start_agents(gang, "touch started-$HPC_DET_NODE_RANK; sleep 60", PYTHONPATH=path)
    assert [agent.wait(timeout=DEADLINE_S) for agent in agents] == [1, 1]
    found = verdict(gang)
    assert (found.host, found.unhealthy, found.rank) == ("node2", True, None)
    # The offset is measured after the file was written and read, which may take a while.
    assert unnamed(found.sentence(), "node2", "clock", "behind") == []
    assert re.search(r"\b(3600|3[2-5]\d\d) s\b", found.sentence())
    assert not (gang.code / "started-1").exists()


@pytest.mark.integration
def test_a_node_whose_scratch_folder_takes_nothing_is_ill(gang: Gang) -> None:
    gang.plan("true", scratch="/proc/sys")
    assert gang.start_agent().wait(timeout=DEADLINE_S) == 1
    assert verdict(gang).unhealthy
    assert verdict(gang).message.startswith("/proc/sys: ")


@pytest.mark.integration
def test_a_site_can_do_without_checks(gang: Gang, tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, [a_late_clock(tmp_path), os.environ.get("PYTHONPATH")]))
    gang.plan("true", health_checks=False)
    assert gang.start_agent(PYTHONPATH=path).wait(timeout=DEADLINE_S) == 0


@pytest.mark.integration
def test_the_hosts_of_an_attempt_are_noted(gang: Gang) -> None:
    agents = start_agents(gang, "sleep 1")
    assert [agent.wait(timeout=DEADLINE_S) for agent in agents] == [0, 0]
    assert read_json(gang.trial.nodes(1)) == ["node1", "node2"]
    assert failures(gang.trial, 1) == []


ONE_FAILS = """
touch up-$HPC_DET_NODE_RANK
while [ $(ls up-* | wc -l) != 2 ]; do sleep 0.05; done
[ $HPC_DET_NODE_RANK = {fails} ] && exit 3
sleep 600
"""


@pytest.mark.integration
@pytest.mark.parametrize("fails", [0, 1])
def test_an_agent_that_fails_ends_the_other_one_and_no_node_is_called_lost(gang: Gang, fails: int) -> None:
    agents = start_agents(gang, ONE_FAILS.format(fails=fails))
    assert [agent.wait(timeout=DEADLINE_S) for agent in agents] == [1, 1]
    assert [failure.message[:11] for failure in failures(gang.trial, 1)] == ["exit code 3"]


# --- node 0 alone, in this process


class Node0:
    def __init__(self, gang: Gang, private: str, nodes: int) -> None:
        gang.plan("true", scheduler="slurm", nodes=nodes, ranks_per_node=1)
        self.selector = selectors.DefaultSelector()
        self.socket = AgentSocket(f"{private}/agent", self.selector)
        self.ended, self.is_open = False, True
        hosts = [f"node{number + 1}" for number in range(nodes)]
        watched = SupervisedGang(gang.trial, JobPlan.of(gang.experiment), 1, hosts)
        self.supervisor = supervision.SupervisorOfNode0(watched, self.selector, self.socket, self._end)
        self.rendezvous = self.supervisor.open("127.0.0.1")

    def _end(self) -> None:
        self.ended = True

    def until(self, condition: Callable[[], object]) -> None:
        wait_for(lambda: self._turn() or condition())

    def _turn(self) -> bool:
        for key, _ in self.selector.select(0.05):
            key.data()
        self.supervisor.poll()
        return False

    def close(self) -> None:
        """Close everything, unless that was done already."""
        if self.is_open:
            self.is_open = False
            self.supervisor.close()
            self.socket.close()
            self.selector.close()


TRAINS = """
import os, time
from pathlib import Path
from hpc_det.distributed.rank_process import join_gang
from hpc_det.node.heartbeat import Progress

process = join_gang({**os.environ, "RANK": "0"})
process.heartbeat.progress = lambda: Progress("training", 7, warm=True, batch=42)
while not Path(PROGRESS).exists():
    time.sleep(0.02)
process.report_exit(0)
"""


@pytest.mark.integration
def test_the_progress_of_rank_0_is_written_while_it_trains_also_without_hang_detection(gang: Gang) -> None:
    (gang.code / "rank.py").write_text(TRAINS.replace("PROGRESS", repr(str(gang.trial.live_progress))))
    shorter = "import sys; from hpc_det.launch.watch import live_progress as live; live.PROGRESS_S = 0.1; "
    shorter += "from hpc_det.launch import agent; sys.exit(agent.main(sys.argv[1:]))"
    gang.plan("exec $PYTHON rank.py", ranks_per_node=1, hang_timeout_s=0)
    agent = gang.start_agent(through=[sys.executable, "-c", f"import sys; sys.argv[1:4] = []; {shorter}"])
    assert agent.wait(timeout=DEADLINE_S) == 0, gang.printed.read_text()
    written = read_map(gang.trial.live_progress) or {}
    assert (written["attempt"], written["batches"]) == (1, 42)


@pytest.fixture
def node_0(gang: Gang) -> Iterator[Node0]:
    with tempfile.TemporaryDirectory() as private:
        node = Node0(gang, private, nodes=3)
        yield node
        node.close()


def arrives(node_0: Node0, node: int, clock_s: float = 0) -> Line:
    """Return the other node's end of a line, after that node has reported that its checks passed."""
    identity = {"role": "agent", "node": node}
    address = ("127.0.0.1", node_0.rendezvous.agents_port)
    with ThreadPoolExecutor() as threads:
        coming = threads.submit(connect, *address, key_of(node_0.rendezvous.secret), identity, DEADLINE_S)
        node_0.until(coming.done)
    line = coming.result()
    line.send({"hello": True})
    line.send({"time": time.time() + clock_s, "problems": []})
    node_0.until(lambda: node in node_0.supervisor._offsets)
    return line


def sentences(gang: Gang) -> list[str]:
    return [failure.sentence() for failure in failures(gang.trial, 1)]


def test_a_node_that_does_not_come_is_named(gang: Gang, node_0: Node0, monkeypatch: pytest.MonkeyPatch) -> None:
    line = arrives(node_0, 2)
    monkeypatch.setattr(peers, "ARRIVE_S", 0.0)
    node_0.until(lambda: node_0.ended)
    each_names(sentences(gang), ["node2", "agent", "600 s"])
    line.close()


@pytest.mark.integration
def test_a_node_that_does_not_come_and_is_down_is_lost(gang: Gang, node_0: Node0, stub: Stub) -> None:
    """The scheduler reports the node as down before the time to arrive is over."""
    stub("sinfo", "echo node3")
    line = arrives(node_0, 1)
    assert node_0.supervisor._arrivals
    node_0.supervisor._arrivals._ask_at = 0.0
    node_0.until(lambda: node_0.ended)
    assert (verdict(gang).host, verdict(gang).node_lost) == ("node3", True)
    line.close()


def test_clocks_are_compared_once_all_have_come(gang: Gang, node_0: Node0, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr("time.time", lambda: now)
    lines = [arrives(node_0, 1, 0), arrives(node_0, 2, 600)]
    node_0.until(lambda: node_0.ended)
    each_names(sentences(gang), ["node3", "clock", "600 s", "ahead", "node1"])
    for line in lines:
        line.close()


# --- nodes that are lost


@pytest.mark.integration
def test_a_line_that_ends_without_a_report_of_an_exit_is_a_lost_node(gang: Gang, node_0: Node0) -> None:
    there, lost = arrives(node_0, 1), arrives(node_0, 2)
    lost.close()
    node_0.until(lambda: node_0.ended)
    (found,) = failures(gang.trial, 1)
    assert (found.host, found.node_lost, found.rank) == ("node3", True, None)
    there.close()


def test_a_node_that_reports_its_exit_is_not_lost_and_node_0_stays_until_all_have(gang: Gang, node_0: Node0) -> None:
    for line in [arrives(node_0, 1), arrives(node_0, 2)]:
        assert node_0.supervisor.awaits_nodes
        line.send({"exit": 0})
        line.close()
    node_0.until(lambda: not node_0.supervisor.awaits_nodes)
    assert (node_0.ended, failures(gang.trial, 1)) == (False, [])


def test_node_0_does_not_stay_for_ever_for_one_that_does_not_leave(
    node_0: Node0, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [arrives(node_0, 1), arrives(node_0, 2)]
    assert node_0.supervisor.awaits_nodes
    monkeypatch.setattr(supervision, "LINGER_S", 0.0)
    assert not node_0.supervisor.awaits_nodes
    for line in lines:
        line.close()


def test_the_exit_of_an_agent_that_has_failed_ends_the_gang_and_blames_no_node(gang: Gang, node_0: Node0) -> None:
    failed, other = arrives(node_0, 1), arrives(node_0, 2)
    failed.send({"exit": 1})
    node_0.until(lambda: node_0.ended)
    node_0.supervisor.report_exit(1)
    while (message := other.receive()) is not None and "exit" not in message.head:
        pass  # node 0 may have requested the progress
    assert message == ({"exit": 1}, b"")
    other.send({"exit": 1})
    node_0.close()
    assert failures(gang.trial, 1) == []
    for line in (failed, other):
        line.close()


def test_a_node_that_was_lost_goes_before_the_ranks_that_complain_of_it(gang: Gang, node_0: Node0) -> None:
    line = arrives(node_0, 1)
    note_failure(gang.trial, 1, failure_now(0, "RuntimeError: connection closed by peer"))
    line.close()
    node_0.close()  # as the agent does when a rank has failed
    assert (verdict(gang).host, verdict(gang).node_lost) == ("node2", True)


# --- while the job is suspended


@pytest.fixture
def suspension(monkeypatch: pytest.MonkeyPatch) -> Suspension:
    """Return the simulated suspension, installed before node 0's clocks begin."""
    return Suspension(monkeypatch)


@pytest.mark.integration
def test_a_node_that_was_lost_while_the_job_was_suspended_is_named_at_once(
    gang: Gang, suspension: Suspension, node_0: Node0
) -> None:
    lines = [arrives(node_0, 1), arrives(node_0, 2)]
    lines[1].close()
    suspension.lasts()
    node_0.until(lambda: node_0.ended)
    assert (verdict(gang).host, verdict(gang).node_lost) == ("node3", True)
    lines[0].close()


@pytest.mark.integration
def test_agents_that_were_suspended_have_as_long_to_settle_as_others(
    gang: Gang, suspension: Suspension, node_0: Node0
) -> None:
    """If all agents were killed at the same time, no node may be blamed."""
    lines = [arrives(node_0, 1), arrives(node_0, 2)]
    lines[1].close()
    node_0.until(lambda: node_0.supervisor._lost)
    suspension.lasts()
    node_0.supervisor.poll()
    assert (node_0.ended, failures(gang.trial, 1)) == (False, [])
    node_0.until(lambda: node_0.ended)
    lines[0].close()


def test_node_0_stays_for_others_that_were_suspended_before_they_reported_their_exit(
    suspension: Suspension, node_0: Node0
) -> None:
    lines = [arrives(node_0, 1), arrives(node_0, 2)]
    assert node_0.supervisor.awaits_nodes
    suspension.lasts()
    assert node_0.supervisor.awaits_nodes
    for line in lines:
        line.close()


def test_nodes_may_still_come_after_a_suspension(gang: Gang, suspension: Suspension, node_0: Node0) -> None:
    line = arrives(node_0, 1)
    suspension.lasts()
    node_0.supervisor.poll()
    assert (node_0.ended, failures(gang.trial, 1)) == (False, [])
    arrives(node_0, 2).close()
    line.close()


@pytest.mark.integration
def test_ranks_that_were_suspended_have_time_to_show_their_stacks(
    suspension: Suspension, node_0: Node0, monkeypatch: pytest.MonkeyPatch
) -> None:
    forced: list[bool] = []
    monkeypatch.setattr(node_0.supervisor.heartbeats, "force_stacks", lambda: forced.append(True))
    node_0.supervisor.ask_ranks("stacks")
    suspension.lasts()
    node_0.supervisor.poll()
    assert not forced
    node_0.until(lambda: forced)


def test_no_clock_is_behind_since_its_time_was_read_after_a_suspension(gang: Gang, node_0: Node0) -> None:
    line = arrives(node_0, 1)
    node_0.supervisor._polled_at -= 3600
    node_0.supervisor._welcome(2, {"time": time.time() - 3600, "problems": []})
    node_0.supervisor.poll()
    assert (node_0.ended, failures(gang.trial, 1)) == (False, [])
    line.close()


# --- agents that break the rules


@pytest.mark.parametrize("message", [{"ranks": [{}]}, {"ranks": 7}, {"time": "x", "problems": []}, {"exit": []}])
def test_an_agent_that_breaks_the_rules_ends_its_own_line(node_0: Node0, message: dict[str, object]) -> None:
    line, other = arrives(node_0, 1), arrives(node_0, 2)
    line.send(message)
    node_0.until(lambda: node_0.supervisor._lost)
    assert [failure.host for failure in node_0.supervisor._lost] == ["node2"]
    other.close()
    line.close()


@pytest.mark.integration
@pytest.mark.parametrize("words", [b"GET / HTTP/1.1\n\n", b'{"token": "guess", "node": 1}\n', b"[1]\n", b'"a"\n'])
def test_strangers_are_hung_up_on(node_0: Node0, words: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_server, "PATIENCE_S", 0.3)
    with socket.create_connection(("127.0.0.1", node_0.rendezvous.agents_port)) as stranger:
        stranger.sendall(words)
        stranger.settimeout(0.01)
        node_0.until(lambda: _is_closed(stranger))
    assert node_0.supervisor._offsets == {0: 0.0}


def _is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True


# --- stop requests


@pytest.mark.integration
@pytest.mark.parametrize("node", [0, 1])
def test_a_signal_to_one_node_stops_all_and_is_recorded_with_its_source(gang: Gang, node: int) -> None:
    agents = start_agents(gang, "exec $PYTHON rank.py $HPC_DET_NODE_RANK --trial")
    gang.wait_for_ranks(0, 1)
    agents[node].send_signal(signal.SIGUSR1)
    assert [agent.wait(timeout=DEADLINE_S) for agent in agents] == [0, 0]
    assert gang.saved() == {"0": "signal", "1": "signal"}
    request = read_stop(gang.trial.stop, 1)
    assert request is not None
    assert (request.reason, request.source) == ("signal", f"SIGUSR1 on {socket.gethostname()}")


@pytest.mark.integration
def test_a_stop_request_in_the_run_folder_reaches_all_nodes(gang: Gang) -> None:
    agents = start_agents(gang, "exec $PYTHON rank.py $HPC_DET_NODE_RANK --trial")
    gang.wait_for_ranks(0, 1)
    request_stop(gang.trial.stop, attempt=1, reason="pause", source="a user")
    assert [agent.wait(timeout=DEADLINE_S) for agent in agents] == [0, 0]
    assert gang.saved() == {"0": "pause", "1": "pause"}
