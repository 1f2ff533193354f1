"""Timings and system metrics of trainings in this process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from hpc_det.config.merge import merge
from hpc_det.core import profile
from hpc_det.distributed.collectives import Distributed
from hpc_det.node.json_files import read_lines
from hpc_det.pytorch import DataLoader, PyTorchCallback
from hpc_det.pytorch.strategies import fusion
from hpc_det.store.folders import TrialFolder
from tests.distributed.ranks import OnRanks
from tests.facts import refused
from tests.pytorch.trials import CONFIG as LIFES
from tests.pytorch.trials import Life, StopAt, Tiny, assert_same

SLOW_S = 0.005
ON = {"enabled": True}
HPARAMS = {"global_batch_size": 4, "workers": 0}


class Records(Dataset[Any]):
    """24 records, each of which takes `takes_s` to load."""

    def __init__(self, takes_s: float) -> None:
        self._takes_s = takes_s

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        time.sleep(self._takes_s)
        return torch.full((5,), 0.01 * index), torch.full((1,), 0.05 * index)


class SlowCallback(PyTorchCallback):
    def on_training_epoch_end(self, epoch_idx: int) -> None:
        time.sleep(6 * SLOW_S)

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        time.sleep(6 * SLOW_S)

    def on_checkpoint_write_end(self, checkpoint_dir: str) -> None:
        time.sleep(6 * SLOW_S)


class Slow(Tiny):
    """Six batches of four records an epoch, in which each part takes a long time."""

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(Records(SLOW_S / 4), batch_size=4)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        time.sleep(2 * SLOW_S)
        return super().train_batch(batch, epoch_idx, batch_idx)

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        time.sleep(4 * SLOW_S)
        return super().evaluate_batch(self.context.to_device(batch))

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {"slow": SlowCallback()}


CONFIG = {
    "searcher": {"max_length": {"epochs": 3}},
    "scheduling_unit": 6,
    "min_validation_period": {"epochs": 1},
    "min_checkpoint_period": {"epochs": 1},
    "checkpoint_policy": "none",
}


@pytest.fixture(autouse=True)
def _short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "SHORTEST_S", 0.0)


def of_rank(life: Life, rank: int = 0) -> list[dict[str, Any]]:
    return read_lines(life.folder.timings(rank))


@pytest.mark.integration
def test_the_timings_of_an_epoch_add_up_to_its_wall_time_and_each_slow_part_is_found(tmp_path: Path) -> None:
    life = Life.begin(tmp_path, Slow, profiling=ON, **CONFIG)
    life.attempt()
    epochs = of_rank(life)
    assert [(line["epoch"], line["count"], line["records"]) for line in epochs] == [(0, 6, 24), (1, 6, 24), (2, 6, 24)]
    shares = [sum(line["seconds"].values()) / line["wall_s"] for line in epochs]
    assert max(shares) > 0.95, "the machine may have stood still between two of them"
    assert all(share < 1.0001 for share in shares), "nothing counts twice"
    for line in epochs:
        seconds = line["seconds"]
        assert seconds["dataloader_next"] >= 24 * SLOW_S / 4
        assert seconds["train_batch"] >= 12 * SLOW_S
        assert seconds["validation"] >= 12 * SLOW_S
        for hook in ("on_training_epoch_end", "on_validation_end", "on_checkpoint_write_end"):
            assert seconds[f"callbacks.SlowCallback.{hook}"] >= 6 * SLOW_S
        assert seconds.keys() >= {"to_device", "from_device", "reduce_metrics", "step_lr_schedulers", "checkpoint"}
        assert line["samples_per_second"] == pytest.approx(24 / line["wall_s"], rel=0.01)
        assert line["exposed_communication_s"] is None


def test_what_is_not_measured_is_as_it_was(tmp_path: Path) -> None:
    life = Life.begin(tmp_path)
    loop = life.attempt()
    assert not life.folder.profile.exists()
    parts = (loop, loop._strategy, loop._data, loop._validation, loop._open_report.window, loop._context)
    assert not any(callable(value) for part in parts for name, value in vars(part).items() if hasattr(type(part), name))
    assert "timed" not in str(loop._callbacks._methods)


def test_measuring_changes_no_bit(tmp_path: Path) -> None:
    plain, measured = Life.begin(tmp_path / "plain"), Life.begin(tmp_path / "measured", profiling=ON)
    plain.attempt()
    measured.attempt()
    assert of_rank(measured)[-1]["batches"] == 18
    assert_same(measured, plain)


def test_only_the_batches_that_are_asked_for_are_measured(tmp_path: Path) -> None:
    life = Life.begin(tmp_path, profiling={**ON, "begin_on_batch": 5, "end_after_batch": 13})
    life.attempt()
    lines = of_rank(life)
    assert (lines[0]["batches"] - lines[0]["count"], lines[-1]["batches"]) == (5, 14)
    assert sum(line["count"] for line in lines) == 9
    assert sum(line["records"] for line in lines) == 2 + (5 * 4 + 2) + 2 * 4, "batches 5, 6 to 11, and 12 to 13"


def test_a_resume_continues_the_files_and_trains_lost_batches_again(tmp_path: Path) -> None:
    life = Life.begin(tmp_path, profiling=ON, scheduling_unit=3)
    with refused(RuntimeError, "a dead node"):
        life.attempt(Dying(13))
    life.attempt()
    first, second = ([line for line in of_rank(life) if line["attempt"] == attempt] for attempt in (1, 2))
    resumed_at = second[0]["batches"] - second[0]["count"]
    assert 0 < resumed_at < first[-1]["batches"], "lost batches are trained, and measured, again"
    assert sum(line["count"] for line in second) == 18 - resumed_at
    assert {line["attempt"] for line in read_lines(life.folder.system_metrics(0))} == {1, 2}


class Dying(StopAt):
    """Dies in place of an agreed stop."""

    def should_stop(self) -> bool:
        if super().should_stop():
            raise RuntimeError("a dead node")
        return False


# --- gangs


class Uneven(Tiny):
    """The loader of rank 1 is slow."""

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(Records(SLOW_S * self.context.distributed.rank), batch_size=2)


def measured_gang(
    distributed: Distributed, folder: Path, changes: Mapping[str, Any] = MappingProxyType({})
) -> list[dict[str, Any]]:
    config = {**CONFIG, "searcher": {"max_length": {"epochs": 6}}, "min_validation_period": {"batches": 0}, **changes}
    profile.SHORTEST_S = 0.0
    life = Life(TrialFolder(folder), Uneven, merge(LIFES, {**config, "profiling": ON}), HPARAMS)
    if distributed.is_chief:
        life.folder.checkpoints.mkdir(parents=True)
    distributed.barrier()
    life.attempt(distributed=distributed)
    return of_rank(life, distributed.rank)


def test_the_slow_loader_of_another_rank_shows_as_waiting_for_gradients(on_ranks: OnRanks, tmp_path: Path) -> None:
    # Without the first of the six epochs, which has several lines: the loop prepares the first save in it.
    waiting, slow = (lines[-5:] for lines in on_ranks(2, measured_gang, tmp_path / "trial"))
    assert [line["count"] for line in waiting] == [line["count"] for line in slow] == 5 * [6]
    loading_s = [line["seconds"]["dataloader_next"] for line in slow]
    assert min(loading_s) >= 12 * SLOW_S
    assert _median_share("dataloader_next", waiting, loading_s) < 1 / 2
    assert _median_share("train_batch", waiting, loading_s) > 1 / 2
    exposed = [line["exposed_communication_s"] for line in waiting if line["exposed_communication_s"] is not None]
    assert sum(exposed) / (len(exposed) * 6) > SLOW_S / 2, "each batch waits for two records"
    for line in (*waiting, *slow):
        assert line["samples_per_second"] == pytest.approx(2 * line["records"] / line["wall_s"], rel=0.01)


def _median_share(timing: str, lines: Sequence[dict[str, Any]], of_s: Sequence[float]) -> float:
    """Return the median over epochs, because a busy machine may delay one of them."""
    shares: list[float] = [line["seconds"][timing] / each for line, each in zip(lines, of_s, strict=True)]
    return statistics.median(shares)


def measured_while_buckets_are_tuned(distributed: Distributed, folder: Path) -> list[float]:
    """Return the time of each measured exchange: at batches 10 and 20, when buckets are resized, and at 30 and 40."""
    fusion.SIZES_MB = (0.0001, 0.001)  # type: ignore[assignment]
    changes = {"searcher": {"max_length": {"epochs": 7}}, "optimizations": {"auto_tune_tensor_fusion": True}}
    lines = measured_gang(distributed, folder, changes)
    return [exposed for line in lines if (exposed := line["exposed_communication_s"]) is not None]


def test_the_exchange_is_timed_while_its_buckets_are_tuned_and_afterwards(on_ranks: OnRanks, tmp_path: Path) -> None:
    for found in on_ranks(2, measured_while_buckets_are_tuned, tmp_path / "trial"):
        assert len(found) == 4
        assert min(found) > 0
        assert len(set(found)) == 4, "each is of another exchange"


def measured_with_another_torch(distributed: Distributed, folder: Path) -> list[dict[str, Any]]:
    del DistributedDataParallel._set_ddp_runtime_logging_sample_rate
    return measured_gang(distributed, folder, {})


def test_with_a_ddp_that_does_not_time_its_exchange_all_else_is_measured(on_ranks: OnRanks, tmp_path: Path) -> None:
    for lines in on_ranks(2, measured_with_another_torch, tmp_path / "trial"):
        assert {line["exposed_communication_s"] for line in lines} == {None}
        assert min(line["seconds"]["train_batch"] for line in lines) > 0
