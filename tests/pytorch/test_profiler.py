from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_det.core.distributed import Distributed
from hpc_det.errors import UsageError
from hpc_det.pytorch import PyTorchTrialContext
from hpc_det.store.folders import TrialFolder
from tests.pytorch.trials import Life, Tiny

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
    (trace,) = life.folder.tensorboard.glob("*.pt.trace.json")
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {name for name in names if name.startswith("ProfilerStep")} == {"ProfilerStep#2", "ProfilerStep#3"}


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
