"""The line between agent and ranks, over real sockets."""

from __future__ import annotations

import json
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
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_det.launch.watch.heartbeat_server import Hearts
from hpc_det.node.agent_socket import Doorbell, Line
from tests.machine import resident_bytes
from tests.wait import DEADLINE_S, wait_for


class Agent:
    """A doorbell, and a note of all that it reports."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.selector = selectors.DefaultSelector()
        self.doorbell = Doorbell(str(path), self.selector)
        self.told: list[object] = []
        self.doorbell.on_lost = lambda rank: self.told.append(("lost", rank))
        self.doorbell.on_failed = lambda: self.told.append("failed")
        self.doorbell.on_heard = lambda signal: self.told.append(("heard", signal))
        self._is_open = True

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self.doorbell.close()
            self.selector.close()

    def turn(self, timeout: float = 0) -> None:
        for key, _ in self.selector.select(timeout):
            key.data()

    def until(self, condition: Callable[[], object]) -> None:
        def has_come() -> object:
            if not (come := condition()):
                self.turn(0.05)
            return come

        wait_for(has_come, otherwise=lambda: f"told: {self.told}")

    def rank_says_hello(self, rank: int) -> Line:
        line = Line.connect(str(self.path))
        line.send({"hello": rank, "pid": 1000 + rank})
        self.until(lambda: rank in self.doorbell.ranks)
        return line


@pytest.fixture
def agent() -> Iterator[Agent]:
    # not tmp_path: a Unix socket's path may have 107 bytes at most
    with tempfile.TemporaryDirectory() as folder:
        agent = Agent(Path(folder) / "agent")
        yield agent
        agent.close()


def test_the_socket_is_its_owners_alone(agent: Agent) -> None:
    assert stat.S_IMODE(agent.path.stat().st_mode) == 0o600


def test_the_agent_knows_the_process_of_every_rank_that_said_hello(agent: Agent) -> None:
    lines = [agent.rank_says_hello(rank) for rank in (3, 1)]
    assert agent.doorbell.ranks == {3: 1003, 1: 1001}
    for line in lines:
        line.connection.close()


def test_a_rank_that_is_gone_without_a_bye_was_lost(agent: Agent) -> None:
    agent.rank_says_hello(2).connection.close()
    agent.until(lambda: agent.told == [("lost", 2)])


HELD_OPEN = """
import os, socket, subprocess, sys
line = socket.socket(socket.AF_UNIX)
line.connect(sys.argv[1])
line.sendall(b'{"hello": 1, "pid": 0}\\n')
subprocess.Popen(["cat"], pass_fds=[line.fileno()], stdin=sys.stdin)
os.abort()
"""
"""A rank that crashes while something else still holds its end of the line."""


def test_a_rank_that_is_gone_is_known_before_its_line_ends(agent: Agent) -> None:
    there = agent.rank_says_hello(0)
    assert agent.doorbell.gone() == []
    command = [sys.executable, "-c", HELD_OPEN, str(agent.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as crashed:
        agent.until(lambda: agent.doorbell.gone() == [1])
        assert agent.told == []
        assert crashed.stdin is not None
        crashed.stdin.close()
        agent.until(lambda: agent.told == [("lost", 1)])
    assert agent.doorbell.gone() == []
    there.connection.close()


def test_a_rank_that_said_bye_may_go(agent: Agent) -> None:
    line, other = agent.rank_says_hello(2), agent.rank_says_hello(1)
    line.send({"bye": 0})
    line.connection.close()
    other.send({"heard": "the end"})
    agent.until(lambda: ("heard", "the end") in agent.told)
    agent.turn(0.01)
    assert agent.told == [("heard", "the end")]
    other.send({"bye": 0})
    other.connection.close()


def test_a_rank_that_leaves_with_a_code_has_failed_and_is_not_lost_as_well(agent: Agent) -> None:
    line = agent.rank_says_hello(0)
    line.send({"bye": 1})
    line.connection.close()
    agent.until(lambda: "failed" in agent.told)
    agent.turn(0.01)
    assert agent.told == ["failed"]


def test_a_rank_that_has_failed_stays_until_the_agent_has_looked_at_the_others(agent: Agent) -> None:
    line = agent.rank_says_hello(0)
    leaving = threading.Thread(target=line.say_goodbye, args=(1,))
    leaving.start()
    leaving.join(0.2)
    assert leaving.is_alive()
    agent.until(lambda: "failed" in agent.told)
    leaving.join(DEADLINE_S)
    assert not leaving.is_alive()
    line.connection.close()


def test_a_rank_that_has_not_failed_and_one_without_an_agent_leave_at_once(agent: Agent) -> None:
    done, failed = agent.rank_says_hello(0), agent.rank_says_hello(1)
    done.say_goodbye(0)
    agent.close()
    failed.say_goodbye(1)
    for line in (done, failed):
        line.connection.close()


def test_a_connection_that_never_said_hello_is_no_rank(agent: Agent) -> None:
    line, rank = Line.connect(str(agent.path)), agent.rank_says_hello(0)
    line.connection.close()
    rank.send({"heard": "SIGTERM"})
    agent.until(lambda: agent.told)
    agent.turn(0.01)
    assert agent.told == [("heard", "SIGTERM")]
    rank.connection.close()


def test_the_bell_reaches_every_rank_once(agent: Agent) -> None:
    lines = [agent.rank_says_hello(rank) for rank in range(3)]
    agent.doorbell.ring("signal", 12.5)
    agent.doorbell.ring("cancel")
    for line in lines:
        assert line.receive() == [{"stop": "signal", "deadline": 12.5}]
    agent.close()
    assert [line.receive() for line in lines] == [None, None, None]
    for line in lines:
        line.connection.close()


def test_a_rank_that_comes_late_hears_the_bell_too(agent: Agent) -> None:
    agent.doorbell.ring("signal", 12.5)
    line = agent.rank_says_hello(0)
    assert line.receive() == [{"stop": "signal", "deadline": 12.5}]
    line.connection.close()


def test_a_rank_learns_that_its_agent_is_gone(agent: Agent) -> None:
    line = agent.rank_says_hello(0)
    agent.close()
    assert line.receive() is None
    line.send({"bye": 0})  # raises nothing
    line.connection.close()


def test_ringing_for_a_rank_that_has_just_died_harms_nobody(agent: Agent) -> None:
    dead, alive = agent.rank_says_hello(0), agent.rank_says_hello(1)
    dead.connection.close()
    agent.doorbell.ring("signal", 12.5)
    assert alive.receive() == [{"stop": "signal", "deadline": 12.5}]
    agent.until(lambda: agent.told == [("lost", 0)])
    alive.connection.close()


def test_half_lines_wait_for_their_other_half(agent: Agent) -> None:
    line = Line.connect(str(agent.path))
    whole = b'{"hello": 4, "pid": 1004}\n{"heard": "SIGUSR2"}\n'
    for byte in whole:
        line.connection.sendall(bytes([byte]))
        agent.turn(0.05)
    agent.until(lambda: agent.told == [("heard", "SIGUSR2")])
    assert agent.doorbell.ranks == {4: 1004}
    line.connection.close()


def test_many_messages_may_come_in_one_piece(agent: Agent) -> None:
    line = Line.connect(str(agent.path))
    line.connection.sendall(b'{"hello": 0, "pid": 1}\n{"heard": "SIGTERM"}\n{"bye": 0}\n')
    line.connection.close()
    agent.until(lambda: agent.told)
    agent.turn(0.01)
    assert agent.told == [("heard", "SIGTERM")]


# --- whoever keeps no rules


def said_by_a_rank(agent: Agent, garbage: bytes) -> Line:
    line = agent.rank_says_hello(7)
    with suppress(OSError):  # it may be hung up on before all has left
        line.connection.settimeout(DEADLINE_S)
        threading.Thread(target=_send, args=(line.connection, garbage), daemon=True).start()
    return line


def _send(connection: socket.socket, *pieces: bytes) -> None:
    with suppress(OSError):
        for piece in pieces:
            connection.sendall(piece)


HEART = {"phase": "training", "steps": 1, "alone": 0, "warm": True, "batch": 1}
NO_MESSAGES = [
    b"\xff\xfe\xff\n",
    b"[" * 60_000 + b"\n",
    b'{"a":' * 60_000 + b"\n",
    b"9" * 100_000 + b"\n",
    b"GET / HTTP/1.1\n",
    b"[1]\n",
    b'"a"\n',
    b"null\n",
    b"\n",
    b"x" * 3 * 2**20,
    b'{"hello": "x", "pid": 1}\n',
    b'{"hello": [], "pid": 1}\n',
    b'{"hello": 1}\n',
    b'{"hello": true, "pid": 1}\n',
    b'{"bye": {}}\n',
    b'{"bye": "0"}\n',
    *(json.dumps({"heart": 0, **HEART, name: {}}).encode() + b"\n" for name in ["heart", *HEART, "at"]),
    b'{"heart": 0}\n',
]


@pytest.mark.parametrize("garbage", NO_MESSAGES, ids=lambda garbage: repr(garbage[:30]))
def test_what_is_no_message_ends_its_line_and_the_rank_is_lost(agent: Agent, garbage: bytes) -> None:
    Hearts(agent.doorbell)
    there = agent.rank_says_hello(1)
    line = said_by_a_rank(agent, garbage)
    agent.until(lambda: agent.told == [("lost", 7)])
    assert line.receive() is None
    there.send({"heard": "SIGTERM"})
    agent.until(lambda: ("heard", "SIGTERM") in agent.told)
    for each in (there, line):
        each.connection.close()


def test_a_gigabyte_without_an_end_takes_no_memory(agent: Agent) -> None:
    before = resident_bytes()
    line = agent.rank_says_hello(7)
    sending = threading.Thread(target=_send, args=(line.connection, *[bytes(2**20)] * 1000))
    sending.start()
    agent.until(lambda: agent.told == [("lost", 7)])
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
        strangers.append(Line.connect(str(agent.path)))
        agent.turn()
    agent.until(lambda: strangers[-1].receive() is None)
    there.send({"heard": "SIGTERM"})
    agent.until(lambda: agent.told == [("heard", "SIGTERM")])
    for stranger in (*strangers, there):
        stranger.connection.close()


def test_another_user_is_hung_up_on(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Should anybody have made the folder theirs."""
    monkeypatch.setattr("hpc_det.node.agent_socket.peer_of", lambda connection: (1, os.geteuid() + 1))
    line = Line.connect(str(agent.path))
    agent.turn(1)
    assert line.receive() is None
    line.connection.close()


@given(st.lists(st.one_of(st.binary(max_size=200), st.text('[]{}:,"\\u019eE-+.ntfhelobyard \n').map(str.encode))))
def test_whatever_comes_raises_nothing(pieces: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        agent = Agent(Path(folder) / "agent")
        Hearts(agent.doorbell)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(agent.path))
            for piece in pieces:
                _send(connection, piece)
                agent.turn()
        for _ in range(3):
            agent.turn()
        agent.close()
