"""Hugging Face's Trainer on hpc_det: a run that was stopped and resumed equals a whole one to the bit."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_det.checkpoint.committed import committed
from hpc_det.store.metrics import read_reports
from tests.facts import unnamed
from tests.integrations.forked import ForkedRuns

pytest.importorskip("transformers")
pytestmark = pytest.mark.integration

SCRIPT = "tests.integrations.hf_script"
EPOCHS = {"eval_strategy": "epoch", "save_strategy": "epoch", "logging_strategy": "epoch"}


@pytest.fixture(scope="module")
def runs() -> Iterator[ForkedRuns]:
    runs = ForkedRuns(SCRIPT)
    yield runs
    runs.close()


class Compared:
    """A whole run, and the same one stopped after step `stop_at` and resumed."""

    def __init__(self, runs: ForkedRuns, folder: Path, stop_at: int, ranks: int = 1, **options: Any) -> None:
        self.whole, codes, log = runs.run(SCRIPT, folder / "whole", "whole", ranks, **options)
        assert codes == [0] * ranks, log
        root = folder / "stopped"
        self.stopped, codes, log = runs.run(SCRIPT, root, "first", ranks, stop_at=stop_at, **options)
        assert codes == [0] * ranks, log
        self.checkpoints = {each.steps for each in committed(Path(self.stopped[0]["folder"], "checkpoints"))}
        self.leftovers = [*Path(self.stopped[0]["folder"], "trainer").glob("checkpoint-*")]
        self.resumed, codes, self.log = runs.run(SCRIPT, root, "second", ranks, **options)
        assert codes == [0] * ranks, self.log

    def assert_same(self, stop_at: int) -> None:
        assert [(each["step"], each["stop"]) for each in self.stopped] == [(stop_at, "preempted")] * len(self.whole)
        for whole, stopped, resumed in zip(self.whole, self.stopped, self.resumed, strict=True):
            assert (resumed["step"], resumed["stop"]) == (whole["step"], None)
            assert stopped["seen"] + resumed["seen"] == whole["seen"]
            assert resumed["weights"] == whole["weights"]
            assert stopped["weights"] != whole["weights"]
        assert self.leftovers == []
        assert stop_at in self.checkpoints

    @property
    def series(self) -> list[list[tuple[str, int, dict[str, float]]]]:
        """The reported metrics of the whole run, and of the other one."""
        return [series(each[0]["folder"]) for each in (self.whole, self.resumed)]


def series(folder: str) -> list[tuple[str, int, dict[str, float]]]:
    found = read_reports(Path(folder, "metrics.jsonl"))
    return [(record["kind"], record["steps"], record["metrics"]) for record in found]


# --- the same bits


@pytest.mark.parametrize(
    ("stop_at", "ranks", "options"),
    [
        pytest.param(8, 1, {}, id="dropout"),
        pytest.param(8, 1, {"dataloader_num_workers": 2}, id="2 workers"),
        pytest.param(
            8, 1, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}, id="accumulation of 2 batches"
        ),
        pytest.param(8, 2, {}, id="2 ranks"),
        pytest.param(6, 1, {"noise": 0.1}, id="the end of a pass with random records"),
        pytest.param(3, 1, {"data": "stream", "max_steps": 6}, id="a stream in its first pass"),
        pytest.param(6, 1, {"data": "stream", "max_steps": 9}, id="a stream at the end of its first pass"),
        pytest.param(8, 1, {"eval_strategy": "steps", "eval_steps": 4}, id="a step with an evaluation"),
        pytest.param(12, 1, {**EPOCHS, "logging_strategy": "steps"}, id="the end of a pass with an evaluation"),
    ],
)
def test_a_stopped_and_resumed_run_equals_a_whole_one(
    runs: ForkedRuns, tmp_path: Path, stop_at: int, ranks: int, options: dict[str, Any]
) -> None:
    compared = Compared(runs, tmp_path, stop_at, ranks, **options)
    compared.assert_same(stop_at)
    whole, stopped = compared.series
    assert stopped == whole
    assert {kind for kind, _, _ in whole} == {"training", *(["validation"] if "eval_strategy" in options else [])}


def test_a_stop_in_a_pass_neither_evaluates_nor_saves_a_second_time(runs: ForkedRuns, tmp_path: Path) -> None:
    compared = Compared(runs, tmp_path, 8, **EPOCHS)
    compared.assert_same(8)
    validations = [[(steps, metrics) for kind, steps, metrics in each if kind == "validation"] for each in compared.series]
    assert [steps for steps, _ in validations[0]] == [6, 12, 18]
    assert validations[0] == validations[1]
    logged = [[steps for kind, steps, _ in each if kind == "training"] for each in compared.series]
    assert logged == [[6, 12, 18]] * 2
    assert compared.checkpoints == {6, 8}


# --- what cannot be the same


def test_random_records_differ_in_an_open_pass(runs: ForkedRuns, tmp_path: Path) -> None:
    compared = Compared(runs, tmp_path, 8, noise=0.1)
    (whole,), (resumed,) = compared.whole, compared.resumed
    assert resumed["step"] == whole["step"]
    assert resumed["weights"] != whole["weights"]


def test_a_stream_after_its_first_pass_begins_again_and_this_is_noted(runs: ForkedRuns, tmp_path: Path) -> None:
    compared = Compared(runs, tmp_path, 8, data="stream", max_steps=12)
    assert compared.resumed[0]["seen"][0] == compared.whole[0]["seen"][0]
    assert unnamed(compared.log, "IterableDataset") == []


def test_another_number_of_ranks_is_noted(runs: ForkedRuns, tmp_path: Path) -> None:
    runs.run(SCRIPT, tmp_path, "first", 2, stop_at=8)
    (resumed,), codes, log = runs.run(SCRIPT, tmp_path, "second", per_device_train_batch_size=8)
    assert (codes, resumed["step"]) == ([0], 18)
    assert "2 ranks, here are 1" in log
