"""Saves of `checkpoint_interval: auto` and at a deadline, in real training."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_det.checkpoint.prune import Policy
from hpc_det.checkpoint.saves import read_saves, write_save
from hpc_det.core.distributed import Distributed
from tests.checkpoint.saved import save
from tests.core.ranks import OnRanks
from tests.pytorch.trials import Life, StopAt, assert_same, differences

SLOW = save(1e4, 1e4)


class Hurry:
    """A clock on which so much time goes by that a save is due at every look."""

    def __init__(self) -> None:
        self._s = 1e9

    def __call__(self) -> float:
        self._s += 1e6
        return self._s


def begin(path: Path) -> Life:
    """Saved at the end only."""
    return Life.begin(path, min_checkpoint_period={"batches": 0}, checkpoint_policy="none")


def live(distributed: Distributed, undisturbed: Life, auto: Life) -> int:
    """How often the one with `auto` has saved in its first attempt."""
    undisturbed.attempt(StopAt(), distributed)
    auto.pace = {"auto": True, "clock": Hurry()}
    auto.attempt(StopAt(12), distributed)
    times = read_saves(auto.folder.saves)
    auto.attempt(StopAt(), distributed)
    return times.count if times else 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_saves_of_auto_change_no_bit_also_not_across_a_resume(on_ranks: OnRanks, tmp_path: Path, ranks: int) -> None:
    undisturbed, auto = (begin(tmp_path / name) for name in ("undisturbed", "auto"))
    for count in on_ranks(ranks, live, undisturbed, auto):
        assert count >= 5
    assert_same(auto, undisturbed)
    measured = read_saves(auto.folder.saves)
    assert measured is not None
    assert measured.count > count + 2  # the second attempt goes on counting
    assert measured.batch_s is not None
    assert measured.size_bytes > 1000


def test_a_stop_saves_before_its_deadline(tmp_path: Path) -> None:
    life, stop = begin(tmp_path), StopAt(9)
    stop.deadline = 1e12
    assert life.attempt(stop).is_saved
    assert len(life.checkpoints) == 1


def test_a_policy_that_changes_on_the_way_holds_from_the_next_save_on(tmp_path: Path) -> None:
    life = Life.begin(tmp_path, min_checkpoint_period={"batches": 7}, checkpoint_policy="none")
    latest = iter([1, 1, 3, 3])
    life.policy = lambda: Policy(trial_best=0, trial_latest=next(latest))
    life.attempt()
    assert life.checkpoints == [7, 14, 18]


def test_a_stop_that_leaves_no_time_leaves_the_checkpoint_that_there_is_and_is_taken_up_from_there(
    tmp_path: Path,
) -> None:
    undisturbed, life = (
        Life.begin(tmp_path / name, min_checkpoint_period={"batches": 7}) for name in ("undisturbed", "life")
    )
    undisturbed.attempt()
    stop = StopAt(16)
    stop.deadline = 0
    write_save(life.folder.saves, SLOW)
    loop = life.attempt(stop)
    assert (loop.end, loop.is_saved) == ("stopped", False)
    assert 15 not in life.checkpoints
    life.attempt()
    assert differences(life.newest, undisturbed.newest) == []
