from __future__ import annotations

import json
import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_det.distributed.collectives import Distributed
from hpc_det.errors import UsageError
from hpc_det.pytorch import PyTorchTrialContext
from hpc_det.pytorch.profiling.profiler import Profiler
from hpc_det.store.folders import TrialFolder
from tests.pytorch.trials import Life, StopAt, Tiny

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
    """At batch 7, in the middle of a trace."""

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        if batch_idx == 7:
            raise RuntimeError
        return super().train_batch(batch, epoch_idx, batch_idx)


def test_each_attempt_begins_the_schedule_anew_and_a_stop_leaves_the_trace_of_what_there_was(tmp_path: Path) -> None:
    """The first attempt ends after three batches, and has its save as another step; the second fails in its fifth."""
    life = Life.begin(tmp_path, Ends, searcher={"max_length": {"batches": 12}})
    life.attempt(StopAt(4))
    assert life.checkpoints == [3]
    with pytest.raises(RuntimeError):
        life.attempt()
    life.trial_class = Profiled
    life.attempt()
    assert traced(life) == [[2, 3], [2, 3], [2, 3]]


def traced(life: Life) -> list[list[int]]:
    """The batches of each trace, as its process counts them, in the order of attempts."""
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
    with pytest.warns(UserWarning, match="on_trace_ready is not used; traces go to the TensorBoard folder"):
        context.set_profiler(on_trace_ready=print)


def test_a_context_without_a_run_has_no_place_for_traces() -> None:
    with pytest.raises(UsageError, match="there is no folder for traces in a context without a run"):
        PyTorchTrialContext(SPEC, Distributed()).set_profiler()


def test_without_a_profiler_nothing_is_recorded(tmp_path: Path) -> None:
    life = Life.begin(tmp_path, searcher={"max_length": {"batches": 2}})
    life.attempt()
    found: list[Any] = list(life.folder.path.rglob("*.pt.trace.json"))
    assert found == []
