"""Starts of agents on the hosts of an allocation."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest

from hpc_det.sgd.capacity import Allocation
from hpc_det.sgd.elastic.agents import BackOff
from hpc_det.store.run_folder import RunFolder
from tests.wait import wait_for


class FailingStarter:
    """A starter whose agents fail at once."""

    name = "the job"
    hosts = ("node1", "node2")

    def commands(self, run: Path, slots: Mapping[str, int]) -> Iterator[tuple[tuple[str, ...], list[str]]]:
        yield from (((host,), [sys.executable, "-c", "raise SystemExit(1)"]) for host in slots)

    def environment(self) -> None:
        return None

    def held(self) -> Collection[str]:
        return self.hosts


@pytest.mark.integration
def test_a_start_counts_once_agents_were_started_on_each_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BackOff, "is_due", lambda again: True)
    run = RunFolder(tmp_path / "run")
    run.make()
    made = Allocation.__new__(Allocation)
    made._slots, made._starter = dict.fromkeys(FailingStarter.hosts, 1), FailingStarter()  # type: ignore[assignment]
    made._again = {host: BackOff() for host in made._slots}
    made._started, made._all, made._held, made._asked = {}, [], FailingStarter.hosts, 0.0
    made.start(run.path, 2)
    wait_for(made.has_ended)
    without = made._without_agent
    monkeypatch.setattr(made, "_without_agent", lambda missing: [host for host in without(missing) if host == "node1"])
    assert (made.renew([]), made._rounds()) == (False, 1)
    wait_for(made.has_ended)
    monkeypatch.setattr(made, "_without_agent", without)
    assert (made.renew([]), made._rounds()) == (True, 2)
    wait_for(made.has_ended)
