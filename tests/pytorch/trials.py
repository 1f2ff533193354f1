"""Small trials, and a class that runs their attempts, which are stopped, killed and resumed."""

from __future__ import annotations

import fnmatch
import math
import random
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

from hpc_det.checkpoint.checkpoints import CheckpointContext
from hpc_det.checkpoint.committed import LOAD_DATA, METADATA, committed, newest_good
from hpc_det.checkpoint.content import load
from hpc_det.checkpoint.retention import Policy
from hpc_det.checkpoint.save_schedule import SaveSchedule
from hpc_det.config.merge import merge
from hpc_det.core.saver import Checkpointing
from hpc_det.distributed.collectives import Distributed
from hpc_det.distributed.metrics import MetricsLog
from hpc_det.distributed.rng import seed_everything
from hpc_det.distributed.searcher import SearcherContext
from hpc_det.node.heartbeat import Phase
from hpc_det.pytorch import DataLoader, LRScheduler, PyTorchCallback, PyTorchTrial, PyTorchTrialContext
from hpc_det.pytorch.loop.loop import Loop, WarmStart
from hpc_det.pytorch.loop.run import portable_of
from hpc_det.pytorch.loop.schedule import Schedule
from hpc_det.pytorch.profiling.measurements import Measurements
from hpc_det.pytorch.strategies.strategy import Strategy
from hpc_det.pytorch.trial.trial import BuiltTrial, Trial
from hpc_det.store.folders import TrialFolder
from hpc_det.store.metrics import read_reports

CONFIG: dict[str, Any] = {
    "data": {},
    "hyperparameters": {},
    "reproducibility": {"experiment_seed": 5},
    "searcher": {"name": "single", "metric": "loss", "smaller_is_better": True, "max_length": {"epochs": 3}},
    "scheduling_unit": 4,
    "min_validation_period": {"batches": 5},
    "min_checkpoint_period": {"batches": 7},
    "perform_initial_validation": False,
    "checkpoint_policy": "best",
    "checkpoint_storage": {"save_experiment_best": 0, "save_trial_best": 1, "save_trial_latest": 1},
}


class StopAt:
    """An agreement to stop at a known tick; in a validation before it, `noticed` becomes true at look number `look`."""

    def __init__(self, tick: float = math.inf, look: int = 1) -> None:
        self.ticks = 0
        self.deadline: float | None = None
        self.stopped = False
        self._stop_at = tick
        self._look = look
        self._looks = 0

    def should_stop(self) -> bool:
        self.ticks += 1
        self._looks = 0
        self.stopped = self.ticks >= self._stop_at
        return self.stopped

    def steps(self, phase: Phase, first: int = 0) -> AbstractContextManager[None]:
        return nullcontext()

    def step(self) -> None:
        """Do nothing, since no agent watches the progress."""

    @property
    def noticed(self) -> bool:
        self._looks += 1
        return self.ticks + 1 >= self._stop_at and self._looks >= self._look


class Counting(PyTorchCallback):
    """Counts epochs and validations, and saves the counts in every checkpoint."""

    def __init__(self) -> None:
        self.seen = {"epochs": 0, "validations": 0}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.seen)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = dict(state_dict)

    def on_training_epoch_end(self, epoch_idx: int) -> None:
        assert epoch_idx == self.seen["epochs"]
        self.seen["epochs"] += 1

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        self.seen["validations"] += 1


class Watching(Counting):
    """Also lowers the learning rate after validations."""

    def __init__(self, plateau: lr_scheduler.ReduceLROnPlateau) -> None:
        super().__init__()
        self._plateau = plateau

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        super().on_validation_end(metrics)
        self._plateau.step(metrics["loss"])


class Tiny(PyTorchTrial):
    """22 records in batches of 4: six batches an epoch, the last one short. It has all kinds of state that a resume
    must restore: dropout, momentum, schedulers, draws from every generator, and a layer that starts in eval mode.
    """

    rate = 0.05

    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))
        model[1].eval()
        self.model: nn.Module = context.wrap_model(model)
        self.optimizer: torch.optim.Optimizer = context.wrap_optimizer(
            torch.optim.SGD(model.parameters(), lr=self.rate, momentum=0.9)
        )
        self.wrap_schedulers(context)

    def wrap_schedulers(self, context: PyTorchTrialContext) -> None:
        context.wrap_lr_scheduler(
            lr_scheduler.StepLR(self.optimizer, 1, gamma=0.9), LRScheduler.StepMode.STEP_EVERY_EPOCH
        )
        self.plateau = context.wrap_lr_scheduler(
            lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=0), LRScheduler.StepMode.MANUAL_STEP
        )

    def build_training_data_loader(self) -> DataLoader:
        return self.loader(22, shuffle=True)

    def build_validation_data_loader(self) -> DataLoader:
        return self.loader(9)

    def loader(self, records: int, shuffle: bool = False) -> DataLoader:
        inputs = torch.randn(records, 5, generator=torch.Generator().manual_seed(records))
        workers = self.context.get_hparam("workers")
        return DataLoader(
            TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)),
            batch_size=self.context.get_per_slot_batch_size(),
            shuffle=shuffle,
            num_workers=workers,
        )

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        assert (batch_idx, epoch_idx) == (self.context.current_train_batch(), self.context.current_train_epoch())
        inputs, targets = batch
        noise = 0.1 * (random.random() + np.random.random())
        loss = (self.model(inputs) - targets + noise).square().mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss, "noise": noise, "rate": self.optimizer.param_groups[0]["lr"]}

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        return {"loss": (self.model(inputs) - targets).abs().mean(), "noise": torch.rand(())}

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {"watching": Watching(self.plateau)}


@dataclass
class Life:
    """One trial and its attempts."""

    folder: TrialFolder
    trial_class: type[Trial] = Tiny
    config: Mapping[str, Any] = field(default_factory=dict)
    hparams: Mapping[str, Any] = field(default_factory=dict)
    attempts: int = 0
    tensorboard: bool = False
    pace: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the SaveSchedule of each attempt."""
    weights: Path | None = None
    """The checkpoint whose weights the trial starts with."""
    retention: Callable[[], Policy] | None = None
    """Returns the retention policy of the experiment at the moment of the call."""
    asynchronous: bool = True
    code: Path | None = None
    """The code that checkpoints contain."""

    @classmethod
    def begin(cls, path: Path, trial_class: type[Trial] = Tiny, hparams: Any = None, **config: Any) -> Life:
        folder = TrialFolder(path)
        folder.checkpoints.mkdir(parents=True)
        return cls(
            folder, trial_class, merge(CONFIG, config), {"global_batch_size": 4, "workers": 0, **(hparams or {})}
        )

    def attempt(self, stop: Any = None, distributed: Distributed | None = None, worker: int | None = None) -> Loop:
        """Create all objects as in a new process and run the attempt to its end. `worker`: number in the experiment's
        search.
        """
        self.attempts += 1
        stop = stop or StopAt()
        spec: dict[str, Any] = {"experiment_id": 1, "trial_id": 1, "trial_seed": 5}
        spec |= {"hparams": self.hparams, "config": self.config}
        strategy: type[Strategy] = self.trial_class.strategy_class
        context = strategy.context_class(spec, distributed or Distributed(), self.folder)
        context.set_enable_tensorboard_logging(self.tensorboard)
        seed_everything(5)
        trial = self.trial_class(context)
        how = strategy(trial, context)
        how.check()
        schedule = Schedule.from_config(self.config, self.hparams.get("global_batch_size"))
        loop = Loop(
            BuiltTrial(trial, context, how),
            schedule,
            stop=stop,
            log=MetricsLog(self.folder, self.attempts),
            checkpointing=Checkpointing(
                checkpoints=CheckpointContext(self.folder.checkpoints, context.distributed),
                save_schedule=SaveSchedule(self.folder, context.distributed, **self.pace),
                retention=self.retention or (lambda: schedule.kept),
                smaller_is_better=schedule.smaller_is_better,
                asynchronous=self.asynchronous,
            ),
            portable=portable_of(spec, self.trial_class, self.code, is_trainer=False),
            searcher=SearcherContext(self.folder, worker, context.distributed) if worker is not None else None,
            warm_start=WarmStart(weights=self.weights),
            measurements=self._measurements(context.distributed),
        )
        loop.run()
        return loop

    def _measurements(self, distributed: Distributed) -> Measurements | None:
        profiling = self.config.get("profiling")
        return Measurements(profiling, self.folder, self.attempts, distributed) if profiling else None

    @property
    def series(self) -> list[tuple[str, int, dict[str, Any]]]:
        return [(record["kind"], record["steps"], record["metrics"]) for record in read_reports(self.folder.metrics)]

    def steps(self, kind: str) -> list[int]:
        return [steps for this, steps, _ in self.series if this == kind]

    @property
    def checkpoints(self) -> list[int]:
        """Batches of each checkpoint, the oldest first."""
        return sorted(checkpoint.steps for checkpoint in committed(self.folder.checkpoints))

    @property
    def newest(self) -> dict[str, Any]:
        """Content of the newest checkpoint that training has written, without event files, which differ between
        processes.
        """
        checkpoint, skipped = newest_good(self.folder.checkpoints)
        assert checkpoint is not None
        assert not skipped
        found: dict[str, Any] = {
            name: load(checkpoint.path / name) if name.endswith(".pth") else (checkpoint.path / name).read_text()
            for name in checkpoint.files
            if name not in (LOAD_DATA, METADATA)
        }
        for name in fnmatch.filter(found, "rank-*.pth"):
            del found[name]["tensorboard"]
        return found


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether all bits are equal, including those of NaN, which overflows of scaled gradients cause."""
    first, second = (value.detach().flatten().contiguous().view(torch.uint8) for value in (one, other))
    return one.shape == other.shape and torch.equal(first, second)


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Return the paths at which two nested values differ in any bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.is_meta and other.is_meta:
            return [] if (one.dtype, one.shape) == (other.dtype, other.shape) else [where]
        return [] if one.dtype == other.dtype and same_bits(one, other) else [where]
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [found for key in one for found in differences(one[key], other[key], f"{where}/{key}")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [found for k in range(len(one)) for found in differences(one[k], other[k], f"{where}/{k}")]
    return [] if one == other else [f"{where}: {one} and {other}"]


def assert_same(life: Life, undisturbed: Life) -> None:
    """Check that all metrics and all bits of the last checkpoint are the same."""
    assert life.series == undisturbed.series
    assert "NaN" not in str(life.series), "a diverged run proves nothing"
    found = differences(life.newest, undisturbed.newest)
    assert not found, found
