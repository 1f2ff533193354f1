"""Gates on the calls that a loop makes at every batch; `tests/benchmarks/core.py` measures them in full.

A round is so short that even a busy machine leaves some rounds undisturbed; the best round counts.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hpc_det.core.core import Core
from hpc_det.core.reports import Reports
from hpc_det.core.saves import LOOK, Saves
from hpc_det.distributed.collectives import Distributed
from tests.benchmarks.core_stops import microseconds
from tests.benchmarks.loops import stops
from tests.core.loops import Loop

pytestmark = pytest.mark.integration

CALLS, ROUNDS = 200, 100
STOP_IN_CALLS = 3.0
"""Upper limit of should_stop, in calls of a method that counts and compares. Typical: 1.7."""
REPORT_US = 20.0
"""Upper limit of a report of one number, in microseconds. Typical: 2."""


class Counter:
    def __init__(self) -> None:
        self._count, self._limit = 0, float("inf")

    def is_reached(self) -> bool:
        self._count += 1
        return self._count >= self._limit


class Calls:
    """Measures calls instead of training."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def run(self) -> None:
        numbers = iter(range(1, CALLS * ROUNDS + 1))
        self._core.report(next(numbers), {"loss": 0.5})  # opens the files
        self._core.hparams["stop"] = best(self._core.should_stop) / best(Counter().is_reached)
        self._core.hparams["report"] = best(lambda: self._core.report(next(numbers), {"loss": 0.5}), ROUNDS - 1)


def best(call: Callable[[], Any], rounds: int = ROUNDS) -> float:
    return min(microseconds(call, CALLS) for _ in range(rounds))


def measured(path: Path) -> dict[str, float]:
    """Return the cost of should_stop in calls of Counter, and that of a report in microseconds.

    A new thread has an empty stack: see tests.pytorch.test_speed.added.
    """

    def calls() -> dict[str, float]:
        with stops(Distributed(), path.name) as stop:
            return Loop.begin(path, Calls).attempt(stop).hparams

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(calls).result()


def test_checks_for_a_stop_and_reports_cost_little(tmp_path: Path) -> None:
    taken = measured(tmp_path / "calls")
    assert taken["stop"] < STOP_IN_CALLS
    assert taken["report"] < REPORT_US


def test_a_loop_without_tracked_objects_looks_for_due_saves_at_few_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, looked_at = Saves.do_what_is_due, []

    def noted(saves: Saves) -> None:
        looked_at.append(saves.next)
        look(saves)

    class Untracked:
        def __init__(self, core: Core) -> None:
            self._core = core

        def run(self) -> None:
            for _ in self._core.batches(range(3 * LOOK)):
                pass

    monkeypatch.setattr(Saves, "do_what_is_due", noted)
    Loop.begin(tmp_path / "untracked", Untracked).attempt()
    assert looked_at == [1, 1 + LOOK, 1 + 2 * LOOK]


def test_the_gates_see_calls_that_use_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    should_stop, training = Core.should_stop, Reports.training

    def slow_stop(core: Core) -> Any:
        os.stat(tmp_path)
        return should_stop(core)

    def slow_report(reports: Reports, steps: int, metrics: Any) -> None:
        training(reports, steps, metrics)
        (tmp_path / "report").write_text(str(steps))

    monkeypatch.setattr(Core, "should_stop", slow_stop)
    monkeypatch.setattr(Reports, "training", slow_report)
    taken = measured(tmp_path / "calls")
    assert taken["stop"] > STOP_IN_CALLS
    assert taken["report"] > REPORT_US
