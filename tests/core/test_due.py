"""Checkpoints of loops that write all files themselves: when they are due, and the passes that such a loop counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hpc_det.core
from hpc_det.core import Core
from hpc_det.distributed.rng import restore_rng, rng_state


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HPC_DET_ROOT", str(tmp_path))
    before = rng_state()
    yield
    restore_rng(before)


def due(config: dict[str, Any], *, per_pass: int = 3, batches: int = 9, validates: bool = False) -> list[int]:
    """Return the batches of a loop at which a checkpoint was due."""
    found = []
    with hpc_det.core.init(config=config, name="loop") as core:
        for step in range(1, batches + 1):
            core.epoch = step // per_pass
            if validates and step % per_pass == 0:
                core.report(step, {"loss": abs(step - 6)}, group="validation")
            if core.is_checkpoint_due(step):
                found.append(step)
                save(core, step)
    return found


def save(core: Core, step: int) -> None:
    with core.checkpoint(step) as folder:
        (folder / "weights").write_text("1")


def test_a_checkpoint_is_due_at_each_period_of_batches_or_passes() -> None:
    assert due({"min_checkpoint_period": {"batches": 4}}) == [4, 8]
    assert due({"min_checkpoint_period": 4}) == [4, 8], "a number without a unit is of batches"
    assert due({"min_checkpoint_period": {"epochs": 2}}) == [6]
    assert due({}) == []


def test_a_better_validation_makes_one_due() -> None:
    searcher = {"name": "single", "metric": "loss"}
    assert due({"searcher": searcher}, validates=True) == [3, 6]
    assert due({"searcher": searcher, "checkpoint_policy": "all"}, validates=True) == [3, 6, 9]
    assert due({"searcher": searcher, "checkpoint_policy": "none"}, validates=True) == []


def test_a_period_within_skipped_batches_is_not_missed() -> None:
    with hpc_det.core.init(config={"min_checkpoint_period": {"batches": 5}}, name="loop") as core:
        assert [core.is_checkpoint_due(step) for step in (2, 4, 6)] == [False, False, True]
        assert core.is_checkpoint_due(8), "it stays due until it is saved"
        save(core, 8)
        assert not core.is_checkpoint_due(8)


def interrupted() -> None:
    with hpc_det.core.init(name="loop") as core:
        core.epoch = 2
        save(core, 6)
        raise KeyError  # otherwise the run is finished, and another one begins


def test_the_passes_of_such_a_loop_are_restored() -> None:
    with pytest.raises(KeyError):
        interrupted()
    with hpc_det.core.init(name="loop") as core:
        assert (core.epoch, core.step) == (2, 6)
