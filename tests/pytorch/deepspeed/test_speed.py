"""A gate on the loop's overhead beside an engine; `tests/benchmarks` measures it in full."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hpc_det.distributed.collectives import Distributed
from hpc_det.pytorch.deepspeed import strategy
from tests.benchmarks import engines, loops
from tests.benchmarks.engines import BareEngine, Case, Trained
from tests.benchmarks.loop_overhead import cost_of, silence
from tests.distributed.ranks import OnRanks
from tests.pytorch.test_speed import COLLECTIVES

MOST_ADDED = 0.065
"""Upper limit of the overhead, as a share of a bare batch of four micro batches: 100 of 1525 us. Typical: 0.01 to 0.04.
"""
ROUNDS, PERIODS, TURN = 3, 4, 10
ACCUMULATING = Case("ZeRO 0, accumulation 4", accumulation=4)


@pytest.mark.long
def test_the_loop_adds_little_to_a_batch_and_changes_no_bit(on_ranks: OnRanks, tmp_path: Path) -> None:
    (rounds,) = on_ranks(1, added, tmp_path)
    assert min(rounds) < MOST_ADDED, rounds


@pytest.mark.long
def test_the_gate_sees_what_slows_the_loop(on_ranks: OnRanks, tmp_path: Path) -> None:
    assert on_ranks(1, added_by_a_slow_one, tmp_path)[0] > MOST_ADDED


def added(distributed: Distributed, root: Path) -> list[float]:
    """Return the overhead of each round; measure until a round is below the limit."""
    rounds: list[float] = []
    for number in range(ROUNDS):
        rounds.append(added_in_a_round(distributed, root / f"trial-{number}"))
        if rounds[-1] < MOST_ADDED:
            break
    return rounds


def added_in_a_round(distributed: Distributed, folder: Path) -> float:
    with silence():
        bare = BareEngine(ACCUMULATING, distributed)
    ours = functools.partial(engines.ours, ACCUMULATING, distributed=distributed)
    return cost_of(ours, bare, PERIODS, folder, TURN).added


def added_by_a_slow_one(distributed: Distributed, root: Path) -> float:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strategy, "mean", lambda metrics: {"mean": sum(range(30_000))})
        return added_in_a_round(distributed, root / "trial")


# --- between two reports

BATCHES = 120


def exchanged(distributed: Distributed, root: Path, case: Case) -> tuple[Counter[str], list[Counter[str]]]:
    """Return the collectives of an engine in a batch of a bare script, and those in each batch of hpc_det's loop."""
    seen: dict[Any, Counter[str]] = defaultdict(Counter)
    now: list[Any] = ["bare"]

    def counted(name: str, collective: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            seen[now[0]][name] += 1
            return collective(*arguments, **options)

        return call

    class Watched(Trained):
        def train_batch(self, dataloader_iter: Iterator[Any] | None, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
            now[0] = batch_idx
            return super().train_batch(dataloader_iter, epoch_idx, batch_idx)

    Watched.case = case
    bare = BareEngine(case, distributed)
    bare.train(1)  # the first batch may create more groups
    for name in COLLECTIVES:
        setattr(dist, name, counted(name, getattr(dist, name)))
    bare.train(1)
    now[0] = "start"
    loops.new_life(root / "trial", Watched, BATCHES, {}).attempt(None, distributed)
    return seen["bare"], [seen[number] for number in range(BATCHES)]


@pytest.mark.parametrize(
    "case",
    [Case("ZeRO 2", stage=2, accumulation=2), Case("pipeline", accumulation=2, is_pipeline=True)],
    ids=lambda case: case.name,
)
def test_between_reports_ranks_exchange_what_engines_do(on_ranks: OnRanks, tmp_path: Path, case: Case) -> None:
    for by_the_engine, by_all in on_ranks(2, exchanged, tmp_path, case):
        assert by_the_engine
        others = [number for number, batch in enumerate(by_all) if batch != by_the_engine]
        assert {99, BATCHES - 1} <= {*others} <= {0, 99, BATCHES - 1}, "the first one, the report, the end"
