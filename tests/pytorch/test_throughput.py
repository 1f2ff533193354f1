"""Short runs that measure the throughput: they only train, on the data or repeatedly on its first batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_det.checkpoint.committed import committed
from hpc_det.config.rank_variables import NO_WHOLE_BATCH, TrainsOn
from hpc_det.core.run import Purpose
from hpc_det.distributed.rng import restore_rng, rng_state
from hpc_det.errors import UsageError
from hpc_det.pytorch import DataLoader, Epoch, Trainer, init
from hpc_det.store.folders import TrialFolder
from hpc_det.store.metrics import read_reports, samples_per_second
from tests.facts import refused
from tests.pytorch.trials import Tiny

CONFIG = {
    "min_validation_period": None,
    "searcher": {"metric": "loss", "max_length": {"batches": 9}},
    "scheduling_unit": 3,
}


@pytest.fixture(autouse=True)
def _own_generators() -> Iterator[None]:
    before = rng_state()
    yield
    restore_rng(before)


class Watched(Tiny):
    """Records the sum of each batch that it receives."""

    seen: list[float]
    loaded: list[int]

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        self.seen.append(batch[0].sum().item())
        metrics = super().train_batch(batch, epoch_idx, batch_idx)
        batch.append("the list is the trial's own")
        return metrics

    def build_training_data_loader(self) -> DataLoader:
        loader = super().build_training_data_loader()
        dataset, loaded = loader.dataset, self.loaded

        class Noted:
            def __len__(self) -> int:
                return len(dataset)  # type: ignore[arg-type]

            def __getitem__(self, index: int) -> Any:
                loaded.append(index)
                return dataset[index]

        return DataLoader(Noted(), batch_size=loader.batch_size)  # type: ignore[arg-type]


def measured(
    root: Path, monkeypatch: pytest.MonkeyPatch, trains_on: TrainsOn, batch_size: int = 4
) -> tuple[Watched, TrialFolder]:
    """Run a script that specifies a length itself; return the trial and its folder."""
    monkeypatch.setenv("HPC_DET_ROOT", str(root))
    monkeypatch.setattr(Watched, "seen", [], raising=False)
    monkeypatch.setattr(Watched, "loaded", [], raising=False)
    with init(hparams={"global_batch_size": batch_size, "workers": 0}, exp_conf=CONFIG) as context:
        context.run = replace(context.run, purpose=Purpose(trains_on=trains_on))
        trial = Watched(context)
        Trainer(trial, context).fit(max_length=Epoch(50), validation_period=Epoch(1), checkpoint_period=Epoch(1))
    (folder,) = (root / "local").iterdir()
    return trial, TrialFolder(folder)


def test_it_trains_as_long_as_it_is_told_and_does_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial, folder = measured(tmp_path, monkeypatch, "data")
    assert [(report["kind"], report["steps"]) for report in read_reports(folder.metrics)] == [
        ("training", 3),
        ("training", 6),
        ("training", 9),
    ]
    assert committed(folder.checkpoints) == []
    assert len(samples_per_second(folder.metrics)) == 3
    assert len({*trial.seen[:6]}) == 6, "an epoch"


def test_the_first_batch_may_stand_for_all_and_no_other_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial, _ = measured(tmp_path, monkeypatch, "first batch")
    assert len(trial.seen) == 9
    assert len({*trial.seen}) == 1
    assert trial.loaded == [0, 1, 2, 3]


def test_a_batch_larger_than_the_data_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(UsageError, NO_WHOLE_BATCH):
        measured(tmp_path, monkeypatch, "data", batch_size=23)
