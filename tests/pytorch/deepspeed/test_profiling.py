"""Timings of a DeepSpeedTrial, measured by the common loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpc_det.distributed.collectives import Distributed
from hpc_det.node.json_files import read_lines
from tests.distributed.ranks import OnRanks
from tests.pytorch.trials import StopAt

CONFIG = {
    "searcher": {"max_length": {"batches": 4}},
    "scheduling_unit": 2,
    "min_validation_period": {"batches": 4},
    "profiling": {"enabled": True, "begin_on_batch": 2},
}


def measured(distributed: Distributed, folder: Path) -> list[dict[str, Any]]:
    from tests.pytorch.deepspeed import noting
    from tests.pytorch.deepspeed.life import life_of

    life = life_of(distributed, folder, noting.Noting, {"accumulation": 3}, **CONFIG)
    life.attempt(StopAt(), distributed)
    return read_lines(life.folder.timings(distributed.rank))


def test_micro_batches_count_where_engines_train(on_ranks: OnRanks, tmp_path: Path) -> None:
    for lines in on_ranks(2, measured, tmp_path / "trial"):
        assert sum(line["count"] for line in lines) == 2
        assert lines[-1]["batches"] == 4
        seconds = lines[-1]["seconds"]
        assert seconds.keys() >= {"dataloader_next", "train_batch", "from_device", "reduce_metrics", "validation"}
        assert "step_lr_schedulers" not in seconds, "engines step their own in train_batch"
        assert lines[-1]["exposed_communication_s"] is None
