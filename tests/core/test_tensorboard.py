from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader  # type: ignore[import-untyped]
from tensorboard.summary.writer import event_file_writer  # type: ignore[import-untyped]
from torch.utils.tensorboard import SummaryWriter

from hpc_det.core.tensorboard import Profiler, TensorBoard
from hpc_det.distributed.collectives import Distributed
from hpc_det.errors import UsageError
from hpc_det.pytorch import PyTorchTrialContext
from hpc_det.store.folders import TrialFolder
from tests.distributed.ranks import OnRanks
from tests.facts import refused, warned
from tests.pytorch.trials import Life, StopAt, Tiny


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder, with the file counter of a process that has written no events. The counter is the end of the
    names of files from the same second, and TensorBoard reads these in alphabetical order, 10 before 9.
    """
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    return tmp_path / "tensorboard"


def written(folder: Path) -> list[tuple[str, int]]:
    """Return the tag and step of every event in all files of the folder."""
    return [
        (value.tag, event.step)
        for file in folder.glob("*tfevents*")
        for event in EventFileLoader(str(file)).Load()
        for value in event.summary.value
    ]


def shown(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the events that TensorBoard shows for the folder itself: (step, value) by tag."""
    events = EventAccumulator(str(folder)).Reload()
    tags: list[str] = events.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


Report = tuple[str, int, dict[str, Any]]


def attempt(folder: Path, resumed_from: dict[str, int], *reports: Report) -> dict[str, int]:
    """Write the reports of an attempt and return the position at its end."""
    board = TensorBoard(folder)
    board.cut(resumed_from)
    for report in reports:
        board.report(*report)
    position = board.position()
    board.close()
    return position


def test_reports_are_shown_under_the_names_that_upstream_gave_them(folder: Path) -> None:
    attempt(
        folder,
        {},
        ("validation", 0, {"loss": 3.0}),
        ("training", 10, {"loss": 2.0, "val": 1.0}),
        ("validation", 10, {"loss": 1.0, "validation_error": 0.5, "val_loss": 0.25, "accuracy": 0.75}),
        ("training", 20, {"loss": 0.5, "val": 1.5}),
    )
    assert shown(folder) == {
        "Determined/loss": [(10, 2.0), (20, 0.5)],
        "Determined/val": [(10, 1.0), (20, 1.5)],
        "Determined/val_loss": [(0, 3.0), (10, 1.0), (10, 0.25)],
        "Determined/validation_error": [(10, 0.5)],
        "Determined/val_accuracy": [(10, 0.75)],
    }


def test_only_numbers_are_shown(folder: Path) -> None:
    metrics = {"int": 3, "numpy": np.float64(0.5), "tensor": torch.tensor([2.0]), "infinite": math.inf, "none": None}
    attempt(folder, {}, ("training", 1, {**metrics, "text": "a", "list": [1.0], "several": torch.ones(2)}))
    assert shown(folder) == {
        "Determined/int": [(1, 3.0)],
        "Determined/numpy": [(1, 0.5)],
        "Determined/tensor": [(1, 2.0)],
        "Determined/infinite": [(1, math.inf)],
    }


def losses(*steps: int) -> list[Report]:
    return [("training", at, {"loss": at / 10}) for at in steps]


def test_the_lost_stretch_beyond_a_checkpoint_is_in_no_file(folder: Path) -> None:
    saved = attempt(folder, {}, *losses(10, 20))
    lost = attempt(folder, saved, *losses(30, 40))
    attempt(folder, saved, ("training", 30, {"loss": 7.0}))
    assert shown(folder) == {"Determined/loss": [(10, 1.0), (20, 2.0), (30, 7.0)]}
    assert sorted(written(folder)) == [("Determined/loss", 10), ("Determined/loss", 20), ("Determined/loss", 30)]
    assert len(lost) == 2


def test_without_any_checkpoint_all_of_it_is_lost(folder: Path) -> None:
    attempt(folder, {}, *losses(10, 20))
    attempt(folder, {}, *losses(10))
    assert shown(folder) == {"Determined/loss": [(10, 1.0)]}


def test_whatever_the_trials_own_writer_counts_is_there_once(folder: Path) -> None:
    """Batches from 0, records and epochs: if steps decided, all tags except the first would be hidden or doubled."""
    first = TensorBoard(folder)
    first.cut({})
    for batch in range(4):
        for tag, step in (("batch", batch), ("records", 1000 * batch), ("epochs", batch // 3)):
            first.writer.add_scalar(tag, 1.0, step)
        if batch == 2:
            saved = first.position()
    first.close()
    second = TensorBoard(folder)
    second.writer.add_text("note", "made before the trial is resumed")
    second.cut(saved)
    second.writer.add_scalar("batch", 2.0, 3)
    second.close()
    assert shown(folder) == {
        "batch": [(0, 1.0), (1, 1.0), (2, 1.0), (3, 2.0)],
        "records": [(0, 1.0), (1000, 1.0), (2000, 1.0)],
        "epochs": [(0, 1.0), (0, 1.0), (0, 1.0)],
    }
    assert EventAccumulator(str(folder)).Reload().Tags()["tensors"] == ["note/text_summary"]


def test_what_others_write_there_is_never_cut(folder: Path) -> None:
    with SummaryWriter(str(folder)) as own:
        own.add_scalar("mine", 1.0, 99)
    attempt(folder, {}, *losses(1))
    assert shown(folder) == {"mine": [(99, 1.0)], "Determined/loss": [(1, pytest.approx(0.1))]}


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_the_folder_is_for_its_owner_alone(folder: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        attempt(folder, {}, *losses(1))
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_there_is_one_writer_and_it_is_made_when_it_is_needed(folder: Path) -> None:
    board = TensorBoard(folder)
    board.cut({})
    board.flush()
    board.close()
    assert not folder.exists()
    writer = board.writer
    board.report("training", 1, {"loss": 1.0})
    assert board.writer is writer
    assert len(list(folder.iterdir())) == 1
    board.close()


def test_what_is_flushed_can_be_seen_at_once(folder: Path) -> None:
    board = TensorBoard(folder)
    for steps in range(30):
        board.report("training", steps, {"loss": 1.0})
    board.flush()
    assert len(shown(folder)["Determined/loss"]) == 30
    board.close()


def test_no_thread_is_left(folder: Path) -> None:
    before = set(threading.enumerate())
    board = TensorBoard(folder)
    board.report("training", 1, {"loss": 1.0})
    assert set(threading.enumerate()) - before
    board.close()
    assert not set(threading.enumerate()) - before
    board.close()


def test_reports_can_be_switched_off(folder: Path) -> None:
    board = TensorBoard(folder)
    assert board.enabled
    board.enabled = False
    board.report("training", 1, {"loss": 1.0})
    assert not folder.exists()


def test_without_a_run_only_the_trial_writes_to_a_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    board = TensorBoard(None)
    board.report("training", 1, {"loss": 1.0})
    board.cut({})
    assert [*tmp_path.iterdir()] == []
    board.writer.add_scalar("own", 1.0)
    board.report("training", 2, {"loss": 1.0})
    board.close()
    [folder] = tmp_path.iterdir()
    assert board.folder == folder
    assert str(folder) in capsys.readouterr().err
    assert written(folder) == [("own", 0)]


def test_without_tensorboard_reports_are_left_out_and_a_writer_says_how_to_install_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    for module in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, module)
    board = TensorBoard(folder)
    board.cut({})
    board.report("training", 1, {"loss": 1.0})
    board.flush()
    board.close()
    assert not folder.exists()
    with refused(UsageError, f"{sys.executable} -m pip install tensorboard"):
        _ = board.writer


@pytest.mark.integration
def test_the_module_itself_loads_no_tensorboard() -> None:
    code = "import hpc_det.core.tensorboard, sys\n"
    code += "print(any(name.startswith('tensorboard') for name in sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


# --- a trial that is stopped and killed


class Writes(Tiny):
    """Writes an event on each rank for each batch, counted from 0."""

    dies_at = -1

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        if batch_idx == self.dies_at:
            self.context.tensorboard.flush()  # otherwise the events might not be on the disk
            os.kill(os.getpid(), signal.SIGKILL)
        self.context.get_tensorboard_writer().add_scalar("mine", self.context.distributed.rank, batch_idx)
        return super().train_batch(batch, epoch_idx, batch_idx)


class WritesAndDies(Writes):
    dies_at = 11


def trained(distributed: Distributed, life: Life, stop_at: float) -> None:
    life.attempt(StopAt(stop_at), distributed)


def test_every_event_is_there_once_after_a_preemption_and_a_kill(on_ranks: OnRanks, tmp_path: Path) -> None:
    """Checkpoints are at batches 5, at the preemption, and 7; the trial is killed in batch 11, after a report of batch
    8.
    """
    undisturbed, life = (Life.begin(tmp_path / name, Writes) for name in ("whole", "cut"))
    undisturbed.tensorboard = life.tensorboard = True
    on_ranks(2, trained, undisturbed, math.inf)
    on_ranks(2, trained, life, 5)
    with refused(pytest.fail.Exception, "died"):
        on_ranks(2, trained, dataclasses.replace(life, trial_class=WritesAndDies), math.inf)
    assert max(life.checkpoints) < 11
    on_ranks(2, trained, life, math.inf)
    for folder in ("", "rank-1"):
        whole, cut = (each.folder.tensorboard / folder for each in (undisturbed, life))
        assert shown(cut) == shown(whole)
        assert sorted(written(cut)) == sorted(written(whole))
    assert shown(life.folder.tensorboard / "rank-1") == {"mine": [(batch, 1.0) for batch in range(18)]}
    assert [step for step, _ in shown(life.folder.tensorboard)["Determined/loss"]] == life.steps("training")


SPEC = {"experiment_id": 1, "trial_id": 1, "trial_seed": 1, "hparams": {}, "config": {}}


class Profiled(Tiny):
    """Waits for a batch, warms up for one, and records two."""

    def __init__(self, context: PyTorchTrialContext) -> None:
        super().__init__(context)
        schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1)
        context.set_profiler(activities=[torch.profiler.ProfilerActivity.CPU], schedule=schedule)


def test_a_schedule_counts_batches_and_gives_one_trace(tmp_path: Path) -> None:
    life = Life.begin(tmp_path, Profiled, searcher={"max_length": {"batches": 6}})
    life.attempt()
    assert traced(life) == [[2, 3]]
    (trace,) = life.folder.tensorboard.iterdir()
    assert trace.name.startswith(f"{socket.gethostname()}_{os.getpid()}.")
    assert trace.name.endswith(".pt.trace.json")


class Ends(Profiled):
    """Ends at batch 7, in the middle of a trace."""

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        if batch_idx == 7:
            raise RuntimeError
        return super().train_batch(batch, epoch_idx, batch_idx)


def test_each_attempt_begins_the_schedule_anew_and_a_stop_leaves_the_trace_of_what_there_was(tmp_path: Path) -> None:
    """The first attempt ends after three batches, and its save counts as a step; the second fails in its fifth one."""
    life = Life.begin(tmp_path, Ends, searcher={"max_length": {"batches": 12}})
    life.attempt(StopAt(4))
    assert life.checkpoints == [3]
    with pytest.raises(RuntimeError):
        life.attempt()
    life.trial_class = Profiled
    life.attempt()
    assert traced(life) == [[2, 3], [2, 3], [2, 3]]


def traced(life: Life) -> list[list[int]]:
    """Return the batches of each trace, as counted by its process, in the order of attempts."""
    traces = sorted(life.folder.tensorboard.glob("*.pt.trace.json"), key=lambda trace: trace.name.split(".")[-4])
    return [_batches(trace) for trace in traces]


def _batches(trace: Path) -> list[int]:
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    return sorted(int(name.removeprefix("ProfilerStep#")) for name in names if name.startswith("ProfilerStep#"))


class Torn:
    """A profile whose job ends while its trace is written."""

    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_text("{")
        raise KeyboardInterrupt


def test_a_trace_is_whole_or_not_there(tmp_path: Path) -> None:
    profiler = Profiler(tmp_path / "tensorboard")
    profile: Any = Torn()
    with pytest.raises(KeyboardInterrupt):
        profiler._keep(profile)
    assert list(tmp_path.glob("tensorboard/*.json")) == []
    assert stat.S_IMODE((tmp_path / "tensorboard").stat().st_mode) == 0o700


def test_the_traces_go_to_the_tensorboard_folder_and_nowhere_else(tmp_path: Path) -> None:
    context = PyTorchTrialContext(SPEC, Distributed(), TrialFolder(tmp_path))
    with warned(UserWarning, "set_profiler: ", "on_trace_ready", "TensorBoard"):
        context.set_profiler(on_trace_ready=print)


def test_a_profiler_without_a_run_is_mentioned_and_never_runs(capsys: pytest.CaptureFixture[str]) -> None:
    context = PyTorchTrialContext.from_config({})
    context.set_profiler(activities=[torch.profiler.ProfilerActivity.CPU])
    assert "set_profiler" in capsys.readouterr().err
    context.profiler.start()
    assert not context.profiler.running


def test_without_a_profiler_nothing_is_recorded(tmp_path: Path) -> None:
    life = Life.begin(tmp_path, searcher={"max_length": {"batches": 2}})
    life.attempt()
    found: list[Any] = list(life.folder.path.rglob("*.pt.trace.json"))
    assert found == []
