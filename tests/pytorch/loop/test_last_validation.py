"""The checkpoint that begins before the last validation: an error in that validation loses no training."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from hpc_det.config.merge import merge
from hpc_det.distributed.collectives import Distributed
from hpc_det.errors import UsageError
from tests.core.test_saver import Disk, disk
from tests.distributed.ranks import OnRanks
from tests.facts import refused
from tests.pytorch.trials import Life, StopAt, Tiny, assert_same

__all__ = ["disk"]

AT_THE_END: dict[str, Any] = {
    "min_validation_period": {"batches": 0},
    "min_checkpoint_period": {"batches": 0},
    "checkpoint_storage": {"save_trial_latest": 9},
}
"""The default periods, with which the trial validates only at its end."""
BATCHES = 18


class FailsAtTheEnd(Tiny):
    fails: ClassVar = True
    trained: ClassVar[list[int]] = []

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        self.trained.append(batch_idx)
        return super().train_batch(batch, epoch_idx, batch_idx)

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        if self.fails:
            raise ZeroDivisionError
        return super().evaluate_batch(batch)


def test_an_error_in_the_last_validation_costs_no_batch(tmp_path: Path) -> None:
    undisturbed = Life.begin(tmp_path / "undisturbed", **AT_THE_END)
    undisturbed.attempt()
    life = Life.begin(tmp_path / "life", FailsAtTheEnd, **AT_THE_END)
    FailsAtTheEnd.fails = True
    with pytest.raises(ZeroDivisionError):
        life.attempt()
    assert life.checkpoints == [BATCHES]
    FailsAtTheEnd.fails = False
    FailsAtTheEnd.trained.clear()
    life.attempt()
    assert not FailsAtTheEnd.trained
    assert life.steps("validation") == [BATCHES]
    assert life.checkpoints == [BATCHES], "the one from before the validation is superseded"
    assert_same(life, undisturbed)


def fails(distributed: Distributed, life: Life) -> None:
    FailsAtTheEnd.fails = True
    with pytest.raises(ZeroDivisionError):
        life.attempt(StopAt(), distributed)


def test_it_has_the_files_of_all_ranks(on_ranks: OnRanks, tmp_path: Path) -> None:
    life = Life.begin(tmp_path, FailsAtTheEnd, **AT_THE_END)
    on_ranks(2, fails, life)
    assert life.checkpoints == [BATCHES]
    assert {"rank-0.pth", "rank-1.pth"} <= life.newest.keys()


def test_a_wrong_metric_costs_no_batch(tmp_path: Path) -> None:
    undisturbed, life = (Life.begin(tmp_path / name, **AT_THE_END) for name in ("undisturbed", "life"))
    undisturbed.attempt()
    right, life.config = life.config, merge(dict(life.config), {"searcher": {"metric": "los"}})
    with refused(UsageError, "searcher.metric: ", "'los'", "'loss'"):
        life.attempt()
    assert life.checkpoints == [BATCHES]
    life.config = right
    life.attempt()
    assert_same(life, undisturbed)


class ValidatesOnSlowDisk(Tiny):
    disk: ClassVar[Disk]

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        self.disk.go.set()
        return super().evaluate_batch(batch)


def test_the_validation_runs_while_it_is_written(tmp_path: Path, disk: Disk) -> None:
    """The disk writes nothing before a validation batch is evaluated."""
    ValidatesOnSlowDisk.disk = disk
    life = Life.begin(tmp_path, ValidatesOnSlowDisk, **AT_THE_END)
    life.attempt()
    assert life.checkpoints == [BATCHES]


def test_what_is_saved_already_is_not_saved_again_before_it(tmp_path: Path) -> None:
    life = Life.begin(tmp_path, FailsAtTheEnd, **AT_THE_END)
    FailsAtTheEnd.fails = True
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            life.attempt()
    assert life.checkpoints == [BATCHES]
