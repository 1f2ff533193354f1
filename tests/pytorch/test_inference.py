"""Batch inference: each record is processed once, whatever ends its attempts, on any number of ranks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpc_det.errors import HpcDetError, UsageError
from hpc_det.node.format_version import KEY
from hpc_det.pytorch import Outputs, TorchBatchProcessor, TorchBatchProcessorContext, torch_batch_process
from hpc_det.pytorch.inference.output_folder import SOURCES
from hpc_det.pytorch.inference.process import _end
from hpc_det.pytorch.inference.records import Records, records_of
from hpc_det.store.metrics import read_reports
from tests.docs.page import File, Page
from tests.e2e.story import Story, hpc_det
from tests.pytorch.inference_gang import Attempt, Numbers, Squares, Stream, Trial, run
from tests.pytorch.inference_script import RECORDS
from tests.wait import DEADLINE_S, wait_for

attempts = st.builds(
    Attempt,
    ranks=st.integers(1, 3),
    batch_size=st.integers(1, 3),
    interval=st.integers(1, 3),
    stop_at=st.none() | st.integers(1, 8),
    kill=st.none() | st.tuples(st.just(0) | st.integers(0, 2), st.integers(1, 16)),
)


def processed(trial: Trial) -> list[int]:
    """Check that values and files agree and are those of the first records in order; return these records."""
    outputs = Outputs(trial.folder)
    values = [(number, int(value)) for number, value in outputs]
    assert values == [(number, number**2) for number in range(len(values))]
    by_first = sorted(outputs.files("*.txt"), key=lambda path: path.name)
    assert [int(word) for path in by_first for word in path.read_text().split()] == [number for number, _ in values]
    return [number for number, _ in values]


# --- exactly once


@pytest.mark.integration
@given(st.integers(0, 25), st.booleans(), st.lists(st.tuples(attempts, st.booleans()), max_size=4), st.integers(1, 3))
def test_each_record_is_processed_once_through_stops_kills_damage_and_other_numbers_of_ranks(
    length: int, is_stream: bool, interrupted: list[tuple[Attempt, bool]], ranks: int
) -> None:
    dataset = Stream(length) if is_stream else Numbers(length)
    folder = Path(tempfile.mkdtemp(dir=os.environ.get("PYTEST_DEBUG_TEMPROOT")))
    try:
        trial = Trial(folder)
        for attempt, damaged in interrupted:
            before = len(trial.newest)
            run(trial, dataset, attempt)
            if trial.newest:
                processed(trial)
            if damaged and len(trial.newest) - before > 1:
                trial.newest.pop()  # the run continues after the one before
        run(trial, dataset, Attempt(ranks=ranks))
        assert processed(trial) == list(range(length))
        assert len(list(Outputs(folder).files("finished"))) == max(1, len(Outputs(folder).parts()[-1].ranks))
        assert trial.metrics[-1] == {"count": length, "sum": sum(range(length))}
        assert [path for path in (folder / "outputs").iterdir() if path.name.startswith(".stage")] == []
    finally:
        shutil.rmtree(folder)


@pytest.mark.integration
@pytest.mark.parametrize("rank", [0, 1])
def test_a_kill_at_any_point_loses_no_record(rank: int, tmp_path: Path) -> None:
    attempt, kill_at, killed = Attempt(ranks=2, batch_size=2, interval=2), 0, True
    while killed:
        kill_at += 1
        trial = Trial(tmp_path / f"{kill_at}")
        trial.folder.mkdir()
        killed = run(trial, Numbers(11), replace(attempt, kill=(rank, kill_at)))
        run(trial, Numbers(11), attempt)
        assert processed(trial) == list(range(11))
        assert trial.metrics[-1] == {"count": 11, "sum": 55}
    assert kill_at > 10


def test_outputs_of_a_damaged_checkpoint_are_hidden_and_not_deleted(tmp_path: Path) -> None:
    trial = Trial(tmp_path)
    run(trial, Numbers(8), Attempt(kill=(0, 16)))
    assert [part.last for part in Outputs(tmp_path).parts()] == [4, 8]
    trial.newest.pop()
    run(trial, Numbers(8), Attempt())
    assert processed(trial) == list(range(8))
    (hidden,) = (tmp_path / "outputs").glob(".replaced-*")
    assert [path.name for path in hidden.rglob("*.txt")] != []


def test_checkpoints_that_would_take_too_much_of_the_time_are_postponed(tmp_path: Path) -> None:
    run(Trial(tmp_path), Numbers(40), Attempt(ranks=2, saving=1e-9))
    assert [part.last for part in Outputs(tmp_path).parts()] == [8, 40]
    assert processed(Trial(tmp_path)) == list(range(40))


# --- arguments and records


def shares(records: Records, done: int = 0, end: int | None = None) -> list[tuple[int, Any, int]]:
    return [
        (share.first, None if share.batch is None else share.batch.tolist(), share.done)
        for share in records.rounds(done, end)
    ]


@pytest.mark.parametrize("dataset", [Numbers(11), Stream(11)], ids=["map", "stream"])
def test_ranks_take_batches_in_turn_and_the_last_round_may_have_fewer(dataset: Any) -> None:
    ranks = [records_of(dataset, 2, None, rank=rank, size=2) for rank in range(2)]
    assert shares(ranks[0], done=3) == [(3, [3, 4], 7), (7, [7, 8], 11)]
    assert shares(ranks[1], done=3) == [(5, [5, 6], 7), (9, [9, 10], 11)]
    assert shares(ranks[0], done=3, end=8) == [(3, [3, 4], 7), (7, [7], 8)]
    assert shares(ranks[1], done=3, end=8) == [(5, [5, 6], 7), (9, None, 8)]
    assert shares(ranks[0], done=11) == []


def test_the_batch_size_may_be_in_the_options_and_is_1_by_default() -> None:
    assert records_of(Numbers(3), None, {"batch_size": 3}, rank=0, size=1).batch_size == 3
    assert records_of(Numbers(3), None, None, rank=0, size=1).batch_size == 1
    assert records_of(Numbers(5), 2, {"drop_last": True}, rank=0, size=1).length == 4


@pytest.mark.parametrize(
    ("batch_size", "options"),
    [
        (2, {"batch_size": 2}),
        (0, {}),
        (2, {"shuffle": True}),
        (2, {"sampler": [0]}),
        (None, {"batch_sampler": [[0]]}),
    ],
    ids=str,
)
def test_arguments_that_contradict_each_other_are_refused(batch_size: int | None, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="torch_batch_process"):
        records_of(Numbers(3), batch_size, options, rank=0, size=1)


def test_a_data_set_without_a_length_must_be_a_stream_and_has_one_worker() -> None:
    class Endless:
        def __getitem__(self, index: int) -> int:
            return index

    with pytest.raises(ValueError, match="Endless"):
        records_of(Endless(), 2, None, rank=0, size=1)  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        records_of(Stream(3), 2, {"num_workers": 2}, rank=0, size=1)
    with pytest.raises(UsageError):
        records_of(Stream(3), 2, {"drop_last": True}, rank=0, size=1)


def test_lengths_in_batches_of_a_rank_and_in_records() -> None:
    records = records_of(Numbers(100), 5, None, rank=0, size=2)
    assert _end(records, None, None) is None
    assert _end(records, 3, None) == 30
    assert _end(records, 3, 12) == 12
    for ignored in (0, -1, 11):
        with pytest.warns(UserWarning, match="max_batches"):
            assert _end(records, ignored, None) is None


def test_a_data_set_of_another_length_is_refused(tmp_path: Path) -> None:
    trial = Trial(tmp_path)
    run(trial, Numbers(8), Attempt(stop_at=3))
    with pytest.raises(UsageError, match="9 records"):
        run(trial, Numbers(9), Attempt())


# --- values


class Returns(TorchBatchProcessor):
    values: Any = None

    def __init__(self, context: TorchBatchProcessorContext) -> None:
        self.context = context

    def process_batch(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return self.values(batch)


def outputs_of(tmp_path: Path, values: Any, length: int = 3) -> Outputs:
    run(Trial(tmp_path), Numbers(length), Attempt(), type("These", (Returns,), {"values": staticmethod(values)}))
    return Outputs(tmp_path)


def test_values_are_maps_lists_and_tensors_with_an_entry_for_each_record(tmp_path: Path) -> None:
    outputs = outputs_of(tmp_path, lambda batch: {"square": batch**2, "text": [f"{each}" for each in batch.tolist()]})
    assert list(outputs) == [(number, {"square": number**2, "text": f"{number}"}) for number in range(3)]
    assert [first for first, _ in outputs.batches()] == [0, 2]


@pytest.mark.parametrize("wrong", [1.0, torch.zeros(()), torch.zeros(3), [1], {"a": [1, 2], "b": [1]}], ids=str)
def test_values_without_an_entry_for_each_record_are_refused(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="2 records"):
        outputs_of(tmp_path, lambda batch: wrong)


def test_values_that_cannot_be_loaded_safely_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HpcDetError):
        outputs_of(tmp_path, lambda batch: [object() for _ in batch])


def test_a_view_of_a_large_tensor_is_stored_alone(tmp_path: Path) -> None:
    outputs = outputs_of(tmp_path, lambda batch: torch.zeros(1 << 16)[: len(batch)])
    assert sum(path.stat().st_size for path in outputs.files("*.pth")) < 10_000


def test_outputs_are_found_in_the_folder_of_a_trial_and_nowhere_else(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        Outputs(tmp_path)
    outputs_of(tmp_path, lambda batch: batch)
    assert list(Outputs(tmp_path / "outputs")) == list(Outputs(tmp_path))


class StoppedAtFour(TorchBatchProcessor):
    """Stops its run at record 4, in the first attempt."""

    def __init__(self, context: TorchBatchProcessorContext) -> None:
        self.core = context._core

    def process_batch(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.core.info.attempt == 1 and 4 in batch:
            os.kill(os.getpid(), signal.SIGTERM)
            wait_for(lambda: self.core._run.stop.noticed)
        return batch


def test_a_call_returns_whether_all_records_are_processed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPC_DET_ROOT", str(tmp_path))
    done = [torch_batch_process(StoppedAtFour, Numbers(9), name="squares") for _ in range(2)]
    assert done == [False, True]


# --- the context


class Uses(Squares):
    def __init__(self, context: TorchBatchProcessorContext) -> None:
        super().__init__(context)
        model = context.prepare_model_for_inference(torch.nn.Dropout())
        assert not model.training
        assert (context.get_distributed_rank(), context.get_distributed_size()) == (0, 1)
        context.report_task_using_checkpoint(Path("checkpoints", "1"))
        context.report_task_using_checkpoint(SimpleNamespace(uuid="2"))
        version = SimpleNamespace(name="digits", version=3, checkpoint=SimpleNamespace(uuid="2"))
        context.report_task_using_model_version(version)


def test_the_sources_of_the_outputs_are_recorded_once(tmp_path: Path) -> None:
    trial = Trial(tmp_path)
    for attempt in (Attempt(stop_at=3), Attempt()):
        run(trial, Numbers(5), attempt, Uses)
    assert json.loads((tmp_path / "outputs" / SOURCES).read_text()) == {
        KEY: 1,
        "checkpoints": [{"checkpoint": "checkpoints/1"}, {"checkpoint": "2"}],
        "model_versions": [{"name": "digits", "version": "3", "checkpoint": "2"}],
    }


def test_the_guide_shows_the_example() -> None:
    docs = Path(__file__).parents[2] / "docs"
    example = docs / "examples" / "batch_inference"
    shown = {
        Path(step.path).name: step.text
        for step in Page.read(docs / "how-to" / "batch-inference.md").steps()
        if isinstance(step, File)
    }
    for name in ("infer.py", "tiny.yaml"):
        assert (example / name).read_text().endswith(shown[name].partition("\n")[2])


# --- processes


SCRIPT = Path(__file__).with_name("inference_script.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def assert_doubled(folder: Path) -> None:
    """Check that each number was doubled once, and counted once, in several parts."""
    outputs = Outputs(folder)
    assert [(number, int(value)) for number, value in outputs] == [(each, 2 * each) for each in range(RECORDS)]
    (metrics,) = [
        record["metrics"] for record in read_reports(folder / "metrics.jsonl") if record["kind"] == "validation"
    ]
    assert metrics == {"count": RECORDS}


@pytest.mark.long
@pytest.mark.integration
def test_torchrun_is_stopped_by_sigterm_and_one_process_processes_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPC_DET_ROOT", str(tmp_path))
    marker, trial = tmp_path / "marker", tmp_path / "experiments" / "1" / "trials" / "1"
    with subprocess.Popen([*TORCHRUN, str(SCRIPT), str(marker)]) as torchrun:
        wait_for(lambda: marker.exists() or torchrun.poll() is not None)
        torchrun.terminate()
    assert json.loads((trial / "outcome.json").read_text())["kind"] == "stopped"
    done = Outputs(trial).parts()[-1].last
    assert 0 < done < RECORDS
    assert [number for number, _ in Outputs(trial)] == list(range(done))
    subprocess.run([sys.executable, SCRIPT, marker], check=True, timeout=DEADLINE_S)
    assert_doubled(trial)


@pytest.mark.long
def test_a_job_is_paused_and_activated(tmp_path: Path) -> None:
    shutil.copy(SCRIPT, tmp_path)
    config = tmp_path / "inference.yaml"
    config.write_text(
        f"name: inference\nentrypoint: python3 -m hpc_det.launch.torch_distributed {SCRIPT.name} {tmp_path}/marker\n"
        "searcher: {name: single, metric: count}\nresources: {slots_per_trial: 2}\n"
    )
    story = Story.begin(config=config, context=tmp_path)
    wait_for((tmp_path / "marker").exists)
    hpc_det("experiment", "pause", story.number)
    story.until(lambda: story.causes == ["paused"])
    done = Outputs(story.trial.path).parts()[-1].last
    assert 0 < done < RECORDS
    hpc_det("experiment", "activate", story.number)
    story.wait()
    assert story.causes == ["paused", "finished"]
    assert_doubled(story.trial.path)
    assert story.describe()["best"]["value"] == RECORDS
