"""A gate on the loop's overhead; `tests/benchmarks` measures it in full."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hpc_det
from hpc_det.distributed.collectives import Distributed
from tests.benchmarks import loops
from tests.benchmarks.loop_overhead import cost_of
from tests.benchmarks.turns import BareLoop, Batch, Cost, ready_made_batches
from tests.distributed.ranks import OnRanks

pytestmark = pytest.mark.integration

MOST_ADDED = 0.4
"""Upper limit of the overhead, as a share of a bare batch: 25 of 61 us. Typical: 0.05 to 0.2; the rest is for load."""
ROUNDS, PERIODS = 5, 12
OWN_FILES = tracemalloc.Filter(True, str(Path(hpc_det.__file__).parent / "*"))


def test_the_loop_adds_little_to_a_batch_and_changes_no_bit(tmp_path: Path) -> None:
    assert any(added(tmp_path / f"trial-{number}") < MOST_ADDED for number in range(ROUNDS))


def test_the_gate_sees_what_slows_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops.Linear, "get_batch_length", lambda trial, batch: sum(range(10_000)))
    assert added(tmp_path / "trial") > MOST_ADDED


def added(folder: Path) -> float:
    """Measure in a new thread, whose stack is empty: Python allocates frames in chunks, and a call across the edge of a
    chunk costs microseconds. The frames of pytest could put that edge directly below either loop.
    """

    def cost() -> Cost:
        torch.set_num_threads(1)
        return cost_of(loops.ours, BareLoop(cycle(ready_made_batches())), PERIODS, folder)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(cost).result().added


# --- between two reports


class Numbered:
    """Batches, with the number of the batch that was requested last."""

    def __init__(self, count: int) -> None:
        self.asked = -1
        self._count = count

    def __iter__(self) -> Iterator[Batch]:
        for number, batch in enumerate(islice(cycle(ready_made_batches()), self._count)):
            self.asked = number
            self.note()
            yield batch

    def note(self) -> None:
        pass


FAMILIES = ("all_", "barrier", "broadcast", "gather", "irecv", "isend", "recv", "reduce", "scatter", "send")
COLLECTIVES = [name for name, value in vars(dist).items() if name.startswith(FAMILIES) and type(value) is FunctionType]


def exchanges(distributed: Distributed, folder: Path) -> dict[int, set[str]]:
    """Return the collectives of the ranks other than those of gradients, by the number of the last batch."""
    batches, seen = Numbered(250), dict[int, set[str]]()

    def counted(name: str) -> Any:
        collective = getattr(dist, name)

        def call(*arguments: Any, **options: Any) -> Any:
            seen.setdefault(batches.asked, set()).add(name)
            return collective(*arguments, **options)

        return call

    for name in COLLECTIVES:
        setattr(dist, name, counted(name))
    loops.train_trial(folder, batches, 250, distributed)
    return seen


def test_between_reports_ranks_exchange_nothing_but_gradients(on_ranks: OnRanks, tmp_path: Path) -> None:
    for seen in on_ranks(2, exchanges, tmp_path / "trial"):
        assert seen.keys() == {-1, 99, 199, 249}, "at the start, at each report, at the end"
        assert seen[99] == {"all_gather"}


class Weighed(Numbered):
    """Measures the memory that the package's lines hold when a batch is requested, by the number of the batch."""

    def __init__(self, count: int, *places: int) -> None:
        super().__init__(count)
        self._places = places
        self.bytes: dict[int, int] = {}

    def note(self) -> None:
        if self.asked in self._places:
            gc.collect()
            snapshot = tracemalloc.take_snapshot().filter_traces([OWN_FILES])
            self.bytes[self.asked] = sum(line.size for line in snapshot.statistics("filename"))


@pytest.fixture
def _traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("_traced")
def test_memory_does_not_grow_with_the_batches(tmp_path: Path) -> None:
    within, over_all = grown(tmp_path / "trial")
    assert abs(within) < 1000
    assert abs(over_all) < 1000


@pytest.mark.usefixtures("_traced")
def test_the_check_sees_what_a_callback_has_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A callback keeps the values of each batch until the report, which receives them."""
    monkeypatch.setattr(loops.Watching, "on_training_workload_end", lambda self, *metrics: None, raising=False)
    within, over_all = grown(tmp_path / "trial")
    assert within > 10_000
    assert abs(over_all) < 1000


def grown(folder: Path) -> tuple[int, int]:
    """Return the growth in bytes over 80 batches between two reports, and over 1600 batches with reports."""
    # Start at batch 2390: before it, Python fills its free lists of numbers, which do not belong to the package. The
    # memory for the first save is checked after 2048 and 4096 batches.
    batches = Weighed(4000, 2390, 2410, 2490, 3990)
    loops.train_trial(folder, batches, 4000)
    early, after_a_report, before_the_next, late = batches.bytes.values()
    return before_the_next - after_a_report, late - early
