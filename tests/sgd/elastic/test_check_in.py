"""What an agent writes to the run about its connection to the driver. Loopback replaces the network."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_det.node.line_server import TcpLineServer
from hpc_det.sgd.elastic.check_in import CheckIn, Unreachable, failed, shown
from hpc_det.sgd.elastic.meeting import Guests, announce, call_driver
from hpc_det.store.run_folder import RunFolder
from tests.facts import refused, unnamed
from tests.wait import DEADLINE_S

FAILED = CheckIn(host="node1", driver="10.0.0.1:4000", address="10.2.0.7", interface="ib0", error="No route to host")
AGENT = {"role": "agent", "node": "node1"}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.make()
    return folder


@contextmanager
def driver(run: RunFolder) -> Iterator[TcpLineServer]:
    key = run.key()
    server = TcpLineServer("127.0.0.1", lambda identity: key, Guests(run, "127.0.0.1").are_allowed_from)
    announce(run, server.host, server.port)
    yield server
    server.close()


def test_an_agent_that_cannot_connect_says_from_where_to_where_and_why(run: RunFolder) -> None:
    announce(run, "127.0.0.9", 9)
    reason = socket.gethostname(), "127.0.0.1 (lo)", "127.0.0.9:9", "Connection refused"
    with refused(Unreachable, *reason):
        call_driver(run, "agent-1", AGENT, 0.1)
    (found,) = failed(run).values()
    assert unnamed(str(found), *reason) == []


def test_a_driver_that_lets_no_agent_in_is_an_error_too(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Guests, "are_allowed_from", lambda guests, address: False)
    with driver(run) as server, refused(Unreachable, f"127.0.0.1:{server.port}", "closed the connection"):
        call_driver(run, "agent-1", AGENT, 0.1)


def test_without_a_route_there_is_an_error_and_no_address(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_det.sgd.elastic.check_in.routed_from", lambda address: None)
    announce(run, "127.0.0.9", 9)
    with refused(Unreachable, "127.0.0.9:9"):
        call_driver(run, "agent-1", AGENT, 0.1)
    assert [each.address for each in failed(run).values()] == [None]
    assert not Guests(run, "10.0.0.7").are_allowed_from("None")


def test_an_agent_that_connects_in_the_end_has_no_error(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = iter([ConnectionRefusedError(111, "Connection refused")])
    create = socket.create_connection

    def connection(*address: object) -> socket.socket:
        for error in tries:
            assert failed(run) == {}
            raise error
        assert len(failed(run)) == 1
        return create(*address)  # type: ignore[arg-type]

    monkeypatch.setattr("hpc_det.sgd.elastic.meeting.TRY_S", 0.0)
    with driver(run) as server:
        monkeypatch.setattr(socket, "create_connection", connection)
        line = call_driver(run, "agent-1", AGENT, DEADLINE_S)
        assert server.events.get(timeout=DEADLINE_S).kind == "arrived"
        line.close()
    assert failed(run) == {}


def test_the_newest_errors_come_first_and_earlier_ones_can_be_left_out(run: RunFolder) -> None:
    for at, name in enumerate(["new", "old", "connected"]):
        replace(FAILED, host=name, error="" if name == "connected" else "refused").write(run, name)
        os.utime(run.nodes / name, (at, 100 - at))
    (run.nodes / "torn").write_text("{")
    assert list(failed(run)) == ["new", "old"]
    assert list(failed(run, ["new"])) == ["old"]


def test_each_host_is_shown_once_and_many_hosts_are_counted() -> None:
    errors = [replace(FAILED, host=f"node{number // 2}", error=f"error {number}") for number in range(10)]
    text = shown(errors)
    assert unnamed(text, "node0", "error 0", "error 2", "error 4", "2 more hosts", "10.2.0.7 (ib0)") == []
    assert "error 1" not in text
