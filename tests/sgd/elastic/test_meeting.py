"""Agents find their driver. Loopback replaces the network: it has an address for each of them (127.0.0.0/8)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpc_det.errors import HpcDetError
from hpc_det.node.line_server import TcpLineServer
from hpc_det.sgd.elastic import meeting
from hpc_det.sgd.elastic.meeting import Guests, announce, announced, call_driver, withdraw
from hpc_det.store.run_folder import RunFolder
from tests.facts import refused
from tests.wait import DEADLINE_S

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


def test_an_agent_that_came_first_finds_the_driver_that_comes(run: RunFolder) -> None:
    came: list[object] = []
    agent = threading.Thread(target=lambda: came.append(call_driver(run, "node1", AGENT, DEADLINE_S)))
    agent.start()
    with driver(run) as server:
        event = server.events.get(timeout=DEADLINE_S)
        agent.join()
        assert (event.kind, event.line.identity) == ("arrived", AGENT)
        came[0].close()  # type: ignore[attr-defined]


def test_an_agent_that_finds_a_driver_of_the_past_waits_for_the_next_one(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "TRY_S", 0.05)
    with driver(run):
        pass
    agent = threading.Thread(target=lambda: call_driver(run, "node1", AGENT, DEADLINE_S).close())
    agent.start()
    with driver(run) as server:
        assert server.events.get(timeout=DEADLINE_S).kind == "arrived"
        agent.join()


def test_the_announcement_is_the_owners_alone(run: RunFolder) -> None:
    announce(run, "10.0.0.7", 4321)
    assert run.driver.stat().st_mode & 0o777 == 0o600
    assert announced(run) == ("10.0.0.7", 4321)
    assert not [path for path in run.path.iterdir() if path.name.startswith(".")]


def test_nobody_finds_a_driver_that_has_withdrawn(run: RunFolder) -> None:
    announce(run, "10.0.0.7", 4321)
    withdraw(run)
    with refused(HpcDetError, run.driver, "0 s", "folder"):
        call_driver(run, "node1", AGENT, 0.1)


def test_an_agent_writes_down_from_where_it_will_come(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "LOOK_S", 0.0)
    guests = Guests(run, "10.0.0.7")
    assert not guests.are_allowed_from("127.0.0.1")
    announce(run, "127.0.0.1", 1)  # no process listens on this port
    with refused(HpcDetError, "127.0.0.1:1", "driver"):
        call_driver(run, "node1", AGENT, 0.1)
    assert guests.are_allowed_from("127.0.0.1")
    assert not guests.are_allowed_from("127.0.0.2")


def test_a_driver_on_loopback_hears_this_machine_alone(run: RunFolder) -> None:
    guests = Guests(run, "127.0.0.1")
    assert guests.are_allowed_from("127.0.0.1")
    assert guests.are_allowed_from("127.8.8.8")
    assert not guests.are_allowed_from("10.0.0.7")


def test_a_new_driver_forgets_who_came_to_the_last_one(run: RunFolder) -> None:
    (run.nodes / "node1").write_text('{"address": "10.0.0.1"}')
    assert not Guests(run, "10.0.0.7").are_allowed_from("10.0.0.1")


def test_those_who_are_rejected_are_remembered_up_to_a_limit_or_until_they_are_accepted(run: RunFolder) -> None:
    guests = Guests(run, "10.0.0.7")
    for host in range(100):
        guests.are_allowed_from(f"10.0.1.{host}")
    assert guests.rejected == [f"10.0.1.{host}" for host in range(meeting.MOST_REJECTED)]
    (run.nodes / "node1").write_text('{"address": "10.0.1.0"}')
    guests._next_look = 0.0
    assert guests.are_allowed_from("10.0.1.0")
    assert "10.0.1.0" not in guests.rejected


def test_what_is_no_address_lets_nobody_in(run: RunFolder) -> None:
    guests = Guests(run, "10.0.0.7")
    (run.nodes / "node1").write_text("torn")
    (run.nodes / "node2").write_text('["address"]')
    (run.nodes / "node3").write_text('{"address": "10.0.0.3"}')
    (run.nodes / ".node4.partial").write_text('{"address": "10.0.0.4"}')
    assert guests.are_allowed_from("10.0.0.3")
    assert not guests.are_allowed_from("10.0.0.4")


def test_many_unknown_callers_cost_few_looks(run: RunFolder) -> None:
    guests = Guests(run, "10.0.0.7")
    assert not guests.are_allowed_from("10.0.0.66")
    (run.nodes / "node3").write_text('{"address": "10.0.0.3"}')
    assert not guests.are_allowed_from("10.0.0.3"), "it looked a moment ago"
    guests._next_look = 0.0
    assert guests.are_allowed_from("10.0.0.3")
