"""The local machine as capacity: one agent, which runs until the driver stops it."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from hpc_det.errors import UsageError
from hpc_det.sgd.capacity import Local
from hpc_det.sgd.capacity.starters import gpus_here
from tests.facts import refused, unnamed
from tests.sgd.capacity.driver import Run
from tests.wait import wait_for

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("stand_in")]


def test_one_agent_has_a_slot_for_each_rank_that_is_wanted_and_leaves_with_the_driver(run: Run) -> None:
    local = Local()
    assert (local.host, local.slots) == ("127.0.0.1", None)
    local.start(run.path, 3)
    (note,) = run.wait_for_agents(1)
    assert note["slots"] == 3
    assert unnamed(local.state(), "this machine", f"process {note['pid']}") == []
    assert os.getsid(note["pid"]) == note["pid"]  # so that Ctrl-C at the terminal reaches only the driver
    assert run.logs() == {f"node-{socket.gethostname()}.log": "here\n"}
    run.hang_up()
    local.stop()
    assert unnamed(local.state(), "this machine", "code 0", "here") == []


@pytest.mark.parametrize("variable", ["PBS_NODEFILE", None])
def test_in_a_job_the_agent_stops_with_the_driver(
    run: Run, monkeypatch: pytest.MonkeyPatch, variable: str | None
) -> None:
    guarded: list[bool] = []
    monkeypatch.setattr("hpc_det.sgd.capacity.allocation.guard_from_now_on", lambda: guarded.append(True))
    if variable:
        monkeypatch.setenv(variable, "/nodes")
    local = Local()
    local.start(run.path, 1)
    assert guarded == [True] * bool(variable)
    run.wait_for_agents(1)
    run.hang_up()
    local.stop()


def test_an_agent_that_was_killed_is_started_again(run: Run) -> None:
    local = Local(slots=2)
    local.start(run.path, 8)
    (first,) = run.wait_for_agents(1)
    assert (local.renew([]), local.has_ended()) == (False, False)
    os.kill(first["pid"], signal.SIGKILL)
    wait_for(local.has_ended)
    wait_for(lambda: local.renew([]))
    run.wait_for_agents(2)
    assert [note["slots"] for note in run.agents()] == [2, 2]
    run.hang_up()
    local.stop()


def test_an_agent_that_does_not_leave_is_ended(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_det.sgd.capacity.allocation.LEAVE_S", 0.1)
    local = Local()
    local.start(run.path, 1)
    (note,) = run.wait_for_agents(1)
    local.stop()
    assert not Path(f"/proc/{note['pid']}").exists()


def test_a_node_without_room_for_a_rank_is_refused() -> None:
    with refused(UsageError, "Local(slots=0)", 1):
        Local(slots=0)


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("0,1,2", ["0", "1", "2"]),
        ("", []),
        ("NoDevFiles", []),
        ("2,-1,3", ["2"]),
        ("GPU-8f2a,MIG-1b", ["GPU-8f2a", "MIG-1b"]),
        ("0, 1", ["0", "1"]),
    ],
)
def test_gpus_are_those_that_cuda_shows(visible: str, names: list[str]) -> None:
    assert gpus_here({"CUDA_VISIBLE_DEVICES": visible}) == names
    local = Local.of_gpus({"CUDA_VISIBLE_DEVICES": visible})
    assert (local.slots, local.has_gpus) == (len(names) or None, bool(names))
