from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from hpc_det.node.lines import Line
from hpc_det.sgd.driver import nodes
from hpc_det.sgd.driver.failures import NotEnoughRanks
from hpc_det.sgd.driver.nodes import InProcess, Nodes, Patience
from hpc_det.sgd.elastic.meeting import call_driver
from hpc_det.store.run_folder import RunFolder
from tests.facts import refused
from tests.wait import DEADLINE_S

AGENT = {"role": "node", "host": "node1", "job": None, "pid": 1, "slots": 1}


def test_a_process_group_outlives_its_gang_until_there_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it could be destroyed while gloo handles a lost connection, and both would wait for each other."""
    monkeypatch.setattr(nodes, "RankWorker", lambda start: None)
    monkeypatch.setattr(RunFolder, "key", lambda run: b"key")
    sent: list[dict[str, Any]] = []
    own = InProcess(RunFolder(tmp_path), ("127.0.0.1", 1), sent.append)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    group = weakref.ref(dist.group.WORLD)
    own.worker = SimpleNamespace(close=dist.destroy_process_group)  # type: ignore[assignment]
    own.send({"do": "end", "generation": 1})
    assert (sent, dist.is_initialized(), group() is None) == ([{"ended": 1}], False, False)
    own.send({"do": "fork", "generation": 2, "size": 1})
    assert group() is None
    own.close()


class FailingJobs:
    """A capacity whose agents end before they connect."""

    host = "127.0.0.1"
    slots, min_slots = 2, 1
    has_queue, has_gpus = True, False

    def __init__(self, *, counts: bool = True, rests: int = 0) -> None:
        self.starts = 0
        self.rests = rests
        """How often `has_ended` still returns False."""
        self.on_renew: Callable[[], None] = lambda: None
        self._counts = counts

    def start(self, run: Path, wanted: int) -> None:
        self.starts += 1

    def renew(self, missing_hosts: Collection[str]) -> bool | None:
        self.starts += 1
        self.on_renew()
        return True if self._counts else None

    def has_ended(self) -> bool:
        self.rests -= 1
        return self.rests < 0

    def state(self) -> str:
        return f"{self.starts} jobs have ended"

    def is_suspended(self, job: str) -> bool:
        return False

    def stop(self) -> None: ...


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[FailingJobs, Patience], Nodes]]:
    monkeypatch.setattr(nodes, "POLL_S", 0.001)
    monkeypatch.setattr(nodes, "LOOK_S", 0.0)
    run, its = RunFolder(tmp_path / "run"), list[Nodes]()
    run.make()

    def made(jobs: FailingJobs, patience: Patience) -> Nodes:
        its.append(Nodes(run, jobs, patience))
        return its[0]

    yield made
    its[0].close()


Opened = Callable[[FailingJobs, Patience], Nodes]


def test_after_some_starts_without_an_agent_the_driver_gives_up_once_no_job_is_left(opened: Opened) -> None:
    jobs = FailingJobs(rests=3)
    its = opened(jobs, Patience())
    its.start(2)
    with refused(NotEnoughRanks, f"{nodes.MOST_STARTS} starts", f"{nodes.MOST_STARTS} jobs have ended", its.address[1]):
        its.await_slots(2, 1)
    assert (jobs.starts, jobs.rests) == (nodes.MOST_STARTS, -1)
    with refused(NotEnoughRanks):  # another call tries again
        its.await_slots(2, 1)
    assert jobs.starts == 2 * nodes.MOST_STARTS


def test_a_connection_from_an_unknown_address_is_named(opened: Opened) -> None:
    its = opened(FailingJobs(counts=False), Patience(startup_timeout_s=0.1))
    its._guests.are_allowed_from("203.0.113.7")
    its.start(1)
    with refused(NotEnoughRanks, "203.0.113.7"):
        its.await_slots(1, 1)


class EnoughStarts(Exception):
    pass


def test_while_an_agent_is_connected_others_are_started_without_a_limit(opened: Opened) -> None:
    jobs, lines = FailingJobs(), list[Line]()
    its = opened(jobs, Patience())

    def follow() -> None:
        if jobs.starts == nodes.MOST_STARTS:
            jobs.rests = 10**9  # the job of this agent
            lines.append(call_driver(its.run, "node1", AGENT, DEADLINE_S))
        if jobs.starts == 3 * nodes.MOST_STARTS:
            raise EnoughStarts

    jobs.on_renew = follow
    its.start(2)
    with pytest.raises(EnoughStarts):
        its.await_slots(2, 2)
    lines[0].close()


def test_a_capacity_that_counts_no_starts_is_waited_for(opened: Opened) -> None:
    jobs = FailingJobs(counts=False)
    its = opened(jobs, Patience(startup_timeout_s=0.2))
    its.start(1)
    with refused(NotEnoughRanks, "0.2 s", "startup_timeout_s"):
        its.await_slots(1, 1)
    assert jobs.starts > nodes.MOST_STARTS
