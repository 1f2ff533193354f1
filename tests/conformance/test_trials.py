from __future__ import annotations

from pathlib import Path

import pytest

from hpc_det.checkpoint.committed import committed
from hpc_det.pytorch import Batch, Trainer, init
from hpc_det.store.folders import TrialFolder
from hpc_det.store.metrics import read_reports
from tests.conformance.trials import ROWS, Example, Hooked

pytestmark = pytest.mark.integration


def train(row: Example) -> None:
    config = {"searcher": {"metric": "error"}, "checkpoint_interval": "none", **row.config}
    with init(hparams={"global_batch_size": 2}, exp_conf=config) as context:
        Trainer(row.trial(context), context).fit(max_length=Batch(row.batches), reporting_period=Batch(1))


def run_below(root: Path) -> TrialFolder:
    (folder,) = (root / "local").iterdir()
    return TrialFolder(folder)


@pytest.fixture(autouse=True)
def _root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPC_DET_ROOT", str(tmp_path))


@pytest.mark.parametrize("row", [row for row in ROWS if not row.raises], ids=lambda row: row.case)
def test_a_trial_trains_the_same(row: Example, tmp_path: Path) -> None:
    train(row)
    folder = run_below(tmp_path)
    reports = list(read_reports(folder.metrics))
    losses = [report["metrics"]["loss"] for report in reports if report["kind"] == "training"]
    assert losses == pytest.approx(row.losses)
    last = [report["metrics"] for report in reports if report["kind"] == "validation"][-1]
    assert {name: last[name] for name in row.validation} == pytest.approx(row.validation)
    if row.trial is Hooked:
        assert [(checkpoint.path / "diary.txt").exists() for checkpoint in committed(folder.checkpoints)] == [True]


@pytest.mark.parametrize("row", [row for row in ROWS if row.raises], ids=lambda row: row.case)
def test_a_trial_is_refused(row: Example) -> None:
    assert row.raises
    with pytest.raises(row.raises):
        train(row)
