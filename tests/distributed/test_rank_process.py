"""Ranks that receive a stop request: real processes, real signals."""

from __future__ import annotations

import importlib
import os
import queue
import resource
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from hpc_det.distributed.collectives import Distributed
from hpc_det.distributed.rank_process import StopListener, failure_of
from hpc_det.node.lines import Message, line_over
from hpc_det.node.network import allow_many_files
from hpc_det.node.process import STOP_SIGNALS, SignalPipe
from tests.distributed.ranks import OnRanks
from tests.facts import unnamed
from tests.wait import DEADLINE_S

NET = """import json
def own():
    return {}["x"]
def library():
    json.loads("{")
def package():
    import a_package
    a_package.fails()
"""


def raised(call: Any) -> BaseException:
    with pytest.raises((KeyError, ValueError)) as found:
        call()
    return found.value


def test_a_failure_names_the_line_of_the_users_code_that_raised_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "net.py").write_text(NET)
    packages = tmp_path / "below" / "site-packages"  # of the Python below a virtual environment
    packages.mkdir(parents=True)
    (packages / "a_package.py").write_text("def fails():\n    raise ValueError\n")
    monkeypatch.syspath_prepend(str(packages))
    monkeypatch.syspath_prepend(str(tmp_path))
    net = importlib.import_module("model.net")
    calls = (net.own, net.library, net.package)
    own, library, package = (failure_of(1, raised(call)) for call in calls)
    assert [own.place, library.place, package.place] == ["model/net.py:3", "model/net.py:5", "model/net.py:8"]
    assert own.message == "KeyError: 'x'"
    assert own.place in own.sentence()


def test_an_error_outside_of_the_users_code_has_no_place() -> None:
    error = ValueError("never raised")
    assert failure_of(None, error).place == ""


FD_SETSIZE = 1024
"""select(2) accepts only file descriptors below this number."""


def signalled_by_hand(distributed: Distributed, number: signal.Signals) -> bool:
    noticed = threading.Event()
    StopListener(SignalPipe(STOP_SIGNALS), None, lambda _: noticed.set())
    os.kill(os.getpid(), number)
    return noticed.wait(DEADLINE_S)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_without_an_agent_a_signal_is_a_notice(on_ranks: OnRanks, number: signal.Signals) -> None:
    assert on_ranks(1, signalled_by_hand, number) == [True]


def signalled_with_many_files(distributed: Distributed) -> bool:
    """Each rank of a gang of a thousand ranks has a connection to every other, and so as many open files."""
    allow_many_files()
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(FD_SETSIZE)]
    try:
        return signalled_by_hand(distributed, signal.SIGTERM)
    finally:
        for file in files:
            os.close(file)


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2 * FD_SETSIZE, reason="too few open files")
def test_a_signal_is_a_notice_with_more_open_files_than_select_takes(on_ranks: OnRanks) -> None:
    assert on_ranks(1, signalled_with_many_files) == [True]


def signalled_under_an_agent(distributed: Distributed) -> tuple[Message | None, bool, float | None]:
    """Return the message that the agent received, whether the rank had notice before the agent's stop, and the
    deadline.
    """
    notices: queue.Queue[float | None] = queue.Queue()
    agent, line = map(line_over, socket.socketpair())
    StopListener(SignalPipe(STOP_SIGNALS), line, notices.put)
    os.kill(os.getpid(), signal.SIGUSR2)
    received, before = agent.receive(), not notices.empty()
    agent.send({"something": "else"})
    agent.send({"stop": "preempted", "deadline": 12.5})
    deadline = notices.get(timeout=DEADLINE_S)
    agent.connection.detach()  # keep it open: the process would end with the connection
    return received, before, deadline


def test_a_signal_is_sent_to_the_agent_which_tells_all_to_stop(on_ranks: OnRanks) -> None:
    assert on_ranks(1, signalled_under_an_agent) == [(Message({"signal": "SIGUSR2"}, b""), False, 12.5)]


def orphaned(distributed: Distributed) -> tuple[int, str]:
    """Return the exit code and the stderr of a rank whose agent has ended."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(write, 2)
        sys.stderr = os.fdopen(2, "w")
        ours, theirs = socket.socketpair()
        StopListener(SignalPipe(STOP_SIGNALS), line_over(theirs), lambda _: None)
        ours.close()
        threading.Event().wait(DEADLINE_S)
        os._exit(0)
    os.close(write)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), os.read(read, 1000).decode()


def test_a_rank_does_not_outlive_its_agent(on_ranks: OnRanks) -> None:
    ((code, said),) = on_ranks(1, orphaned)
    assert (code, unnamed(said, "hpc-det", "node agent")) == (1, [])
