"""The lines between an agent and its ranks, over real sockets."""

from __future__ import annotations

import os
import selectors
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from struct import Struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_det.launch.watch.hang import HeartbeatServer
from hpc_det.node.agent_socket import AgentSocket, report_exit, say_hello
from hpc_det.node.frames import LONGEST_HEAD, Message, Seals, Unsealed
from hpc_det.node.lines import Line, connect_local
from tests.machine import resident_bytes
from tests.wait import DEADLINE_S, wait_for


class Agent:
    """The agent's end, with a record of all events that it reports."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.selector = selectors.DefaultSelector()
        self.socket = AgentSocket(str(path), self.selector)
        self.events: list[object] = []
        self.socket.on_lost = lambda rank: self.events.append(("lost", rank))
        self.socket.on_failed = lambda: self.events.append("failed")
        self.socket.on_signal = lambda name: self.events.append(("signal", name))
        self._is_open = True

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self.socket.close()
            self.selector.close()

    def turn(self, timeout: float = 0) -> None:
        for key, _ in self.selector.select(timeout):
            key.data()

    def until(self, condition: Callable[[], object]) -> None:
        def has_come() -> object:
            if not (come := condition()):
                self.turn(0.05)
            return come

        wait_for(has_come, otherwise=lambda: f"events: {self.events}")

    def rank_says_hello(self, rank: int) -> Line:
        line = connect_local(str(self.path))
        say_hello(line, rank, 1000 + rank)
        self.until(lambda: rank in self.socket.ranks)
        return line


LENGTHS = Struct(">IQ32s")
STOP = Message({"stop": "signal", "deadline": 12.5}, b"")


def framed(head: Any) -> bytes:
    """Return the bytes of this message from a rank."""
    return Unsealed(head, b"").opening(Seals(None))


@pytest.fixture
def agent() -> Iterator[Agent]:
    # not tmp_path: the path of a Unix socket is limited to 107 bytes
    with tempfile.TemporaryDirectory() as folder:
        agent = Agent(Path(folder) / "agent")
        yield agent
        agent.close()


def test_the_socket_is_its_owners_alone(agent: Agent) -> None:
    assert stat.S_IMODE(agent.path.stat().st_mode) == 0o600


def test_the_agent_knows_the_process_of_every_rank_that_said_hello(agent: Agent) -> None:
    lines = [agent.rank_says_hello(rank) for rank in (3, 1)]
    assert agent.socket.ranks == {3: 1003, 1: 1001}
    for line in lines:
        line.connection.close()


def test_a_rank_that_is_gone_without_a_report_of_its_exit_was_lost(agent: Agent) -> None:
    agent.rank_says_hello(2).connection.close()
    agent.until(lambda: agent.events == [("lost", 2)])


HELD_OPEN = """
import os, subprocess, sys
from hpc_det.node.agent_socket import say_hello
from hpc_det.node.lines import connect_local
line = connect_local(sys.argv[1])
say_hello(line, 1, 0)
subprocess.Popen(["cat"], pass_fds=[line.connection.fileno()], stdin=sys.stdin)
os.abort()
"""
"""A rank that crashes while another process still holds its end of the line."""


@pytest.mark.integration
def test_a_rank_that_is_gone_is_known_before_its_line_ends(agent: Agent) -> None:
    there = agent.rank_says_hello(0)
    assert agent.socket.dead_ranks() == []
    command = [sys.executable, "-c", HELD_OPEN, str(agent.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as crashed:
        agent.until(lambda: agent.socket.dead_ranks() == [1])
        assert agent.events == []
        assert crashed.stdin is not None
        crashed.stdin.close()
        agent.until(lambda: agent.events == [("lost", 1)])
    assert agent.socket.dead_ranks() == []
    there.connection.close()


def test_a_rank_that_reported_its_exit_may_go(agent: Agent) -> None:
    line, other = agent.rank_says_hello(2), agent.rank_says_hello(1)
    line.send({"exit": 0})
    line.connection.close()
    other.send({"signal": "the end"})
    agent.until(lambda: ("signal", "the end") in agent.events)
    agent.turn(0.01)
    assert agent.events == [("signal", "the end")]
    other.send({"exit": 0})
    other.connection.close()


def test_a_rank_that_leaves_with_a_code_has_failed_and_is_not_lost_as_well(agent: Agent) -> None:
    line = agent.rank_says_hello(0)
    line.send({"exit": 1})
    line.connection.close()
    agent.until(lambda: "failed" in agent.events)
    agent.turn(0.01)
    assert agent.events == ["failed"]


def test_a_rank_that_has_failed_stays_until_the_agent_has_looked_at_the_others(agent: Agent) -> None:
    line = agent.rank_says_hello(0)
    leaving = threading.Thread(target=report_exit, args=(line, 1))
    leaving.start()
    leaving.join(0.2)
    assert leaving.is_alive()
    agent.until(lambda: "failed" in agent.events)
    leaving.join(DEADLINE_S)
    assert not leaving.is_alive()
    line.connection.close()


def test_a_rank_that_has_not_failed_and_one_without_an_agent_leave_at_once(agent: Agent) -> None:
    done, failed = agent.rank_says_hello(0), agent.rank_says_hello(1)
    report_exit(done, 0)
    agent.close()
    report_exit(failed, 1)
    for line in (done, failed):
        line.connection.close()


def test_a_connection_that_never_said_hello_is_no_rank(agent: Agent) -> None:
    line, rank = connect_local(str(agent.path)), agent.rank_says_hello(0)
    line.connection.close()
    rank.send({"signal": "SIGTERM"})
    agent.until(lambda: agent.events)
    agent.turn(0.01)
    assert agent.events == [("signal", "SIGTERM")]
    rank.connection.close()


def test_a_stop_reaches_every_rank_once(agent: Agent) -> None:
    lines = [agent.rank_says_hello(rank) for rank in range(3)]
    agent.socket.send_stop("signal", 12.5)
    agent.socket.send_stop("cancel")
    for line in lines:
        assert line.receive() == STOP
    agent.close()
    assert [line.receive() for line in lines] == [None, None, None]
    for line in lines:
        line.connection.close()


def test_a_launcher_learns_which_ranks_receive_the_stop(agent: Agent) -> None:
    launcher, rank = connect_local(str(agent.path)), agent.rank_says_hello(3)
    agent.until(lambda: len(agent.socket._lines) == 2)
    agent.socket.send_stop("signal", 12.5)
    assert launcher.receive() == Message({**STOP.head, "joined": [3]}, b"")
    assert rank.receive() == STOP
    launcher.connection.close()
    rank.connection.close()


def test_a_rank_that_comes_late_is_told_of_the_stop_too(agent: Agent) -> None:
    agent.socket.send_stop("signal", 12.5)
    line = agent.rank_says_hello(0)
    assert line.receive() == STOP
    line.connection.close()


def test_a_rank_learns_that_its_agent_is_gone(agent: Agent) -> None:
    line = agent.rank_says_hello(0)
    agent.close()
    assert line.receive() is None
    line.send({"exit": 0})  # raises nothing
    line.connection.close()


def test_a_stop_for_a_rank_that_has_just_died_harms_nobody(agent: Agent) -> None:
    dead, alive = agent.rank_says_hello(0), agent.rank_says_hello(1)
    dead.connection.close()
    agent.socket.send_stop("signal", 12.5)
    assert alive.receive() == STOP
    agent.until(lambda: agent.events == [("lost", 0)])
    alive.connection.close()


def test_half_messages_wait_for_their_other_half(agent: Agent) -> None:
    line = connect_local(str(agent.path))
    whole = framed({"hello": 4, "pid": 1004}) + framed({"signal": "SIGUSR2"})
    for byte in whole:
        line.connection.sendall(bytes([byte]))
        agent.turn(0.05)
    agent.until(lambda: agent.events == [("signal", "SIGUSR2")])
    assert agent.socket.ranks == {4: 1004}
    line.connection.close()


def test_many_messages_may_come_in_one_piece(agent: Agent) -> None:
    line = connect_local(str(agent.path))
    line.connection.sendall(framed({"hello": 0, "pid": 1}) + framed({"signal": "SIGTERM"}) + framed({"exit": 0}))
    line.connection.close()
    agent.until(lambda: agent.events)
    agent.turn(0.01)
    assert agent.events == [("signal", "SIGTERM")]


# --- ranks that break the rules


def said_by_a_rank(agent: Agent, garbage: bytes) -> Line:
    line = agent.rank_says_hello(7)
    with suppress(OSError):  # the agent may close the line before all is sent
        line.connection.settimeout(DEADLINE_S)
        threading.Thread(target=_send, args=(line.connection, garbage), daemon=True).start()
    return line


def _send(connection: socket.socket, *pieces: bytes) -> None:
    with suppress(OSError):
        for piece in pieces:
            connection.sendall(piece)


HEARTBEAT = {"phase": "training", "steps": 1, "alone": 0, "warm": True, "batch": 1}
NOT_JSON = [b"\xff\xfe\xff", b"[" * 60_000, b'{"a":' * 60_000, b"9" * 100_000, b"[1]", b'"a"', b"null", b""]
NOT_OURS: list[dict[str, Any]] = [
    {"hello": "x", "pid": 1},
    {"hello": [], "pid": 1},
    {"hello": 1},
    {"hello": True, "pid": 1},
    {"exit": {}},
    {"exit": "0"},
    *({"heartbeat": 0, **HEARTBEAT, name: {}} for name in ["heartbeat", *HEARTBEAT, "at"]),
    {"heartbeat": 0},
]
NO_MESSAGES = [
    b"GET / HTTP/1.1\r\nHost: node1\r\n\r\nAccept: */*\r\n",
    b'{"hello": 7, "pid": 1, "and": "JSON without a frame around it"}\n',
    b"x" * 3 * 2**20,
    LENGTHS.pack(LONGEST_HEAD + 1, 0, bytes(32)),
    LENGTHS.pack(2, 1, sha256(b"{}x").digest()) + b"{}x",  # the length of the body has no seal
    LENGTHS.pack(2, 0, bytes(32)) + b"{}",
    *(LENGTHS.pack(len(head), 0, sha256(head).digest()) + head for head in NOT_JSON),
    *map(framed, NOT_OURS),
]


@pytest.mark.parametrize("garbage", NO_MESSAGES, ids=lambda garbage: repr(garbage[:30]))
def test_what_is_no_message_ends_its_line_and_the_rank_is_lost(agent: Agent, garbage: bytes) -> None:
    HeartbeatServer(agent.socket)
    there = agent.rank_says_hello(1)
    line = said_by_a_rank(agent, garbage)
    agent.until(lambda: agent.events == [("lost", 7)])
    assert line.receive() is None
    there.send({"signal": "SIGTERM"})
    agent.until(lambda: ("signal", "SIGTERM") in agent.events)
    for each in (there, line):
        each.connection.close()


def test_a_gigabyte_without_an_end_takes_no_memory(agent: Agent) -> None:
    before = resident_bytes()
    line = agent.rank_says_hello(7)
    sending = threading.Thread(target=_send, args=(line.connection, *[bytes(2**20)] * 1000))
    sending.start()
    agent.until(lambda: agent.events == [("lost", 7)])
    sending.join()
    assert resident_bytes() - before < 30 * 2**20
    line.connection.close()


def test_one_that_opens_lines_without_end_takes_no_file_from_the_agent(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpc_det.node.agent_socket._most_lines", lambda: 50)
    there = agent.rank_says_hello(1)
    strangers = []
    for _ in range(200):
        strangers.append(connect_local(str(agent.path)))
        agent.turn()
    agent.until(lambda: strangers[-1].receive() is None)
    there.send({"signal": "SIGTERM"})
    agent.until(lambda: agent.events == [("signal", "SIGTERM")])
    for stranger in (*strangers, there):
        stranger.connection.close()


def test_another_user_is_hung_up_on(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user might have gained access to the folder."""
    monkeypatch.setattr("hpc_det.node.agent_socket.peer_of", lambda connection: (1, os.geteuid() + 1))
    line = connect_local(str(agent.path))
    agent.turn(1)
    assert line.receive() is None
    line.connection.close()


def with_lengths(head: bytes) -> bytes:
    return LENGTHS.pack(len(head), 0, sha256(head).digest()) + head


HEADS = st.text('[]{}:,"\\u019eE-+.ntfhelobxiard ').map(str.encode).map(with_lengths)


@given(st.lists(st.one_of(st.binary(max_size=200), HEADS)))
def test_whatever_comes_raises_nothing(pieces: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        agent = Agent(Path(folder) / "agent")
        HeartbeatServer(agent.socket)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(agent.path))
            for piece in pieces:
                _send(connection, piece)
                agent.turn()
        for _ in range(3):
            agent.turn()
        agent.close()
