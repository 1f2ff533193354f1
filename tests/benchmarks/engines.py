"""One workload for DeepSpeed's engines, in a bare script and in a DeepSpeedTrial that train in turns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from torch import nn
from torch.nn.functional import cross_entropy

from hpc_det.distributed.collectives import Distributed
from hpc_det.pytorch.deepspeed import DeepSpeedTrial, DeepSpeedTrialContext
from hpc_det.pytorch.deepspeed.runtime import prepare
from tests.benchmarks import loops
from tests.benchmarks.turns import (
    CLASSES,
    FEATURES,
    RATE,
    RECORDS,
    Batch,
    Turns,
    ready_made_batches,
    weights_of,
    when_done,
)


@dataclass(frozen=True)
class Case:
    """A configuration of an engine."""

    name: str
    stage: int = 0
    accumulation: int = 1
    is_pipeline: bool = False
    width: int = 64
    hidden: int = 1
    """Number of hidden layers of that width."""

    @property
    def config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": RECORDS,
            "gradient_accumulation_steps": self.accumulation,
            "zero_optimization": {"stage": self.stage},
            "optimizer": {"type": "AdamW", "params": {"lr": RATE, "torch_adam": True}},
            "steps_per_print": 10**9,
        }

    def new_engine(self) -> Any:
        """Call `prepare` before."""
        torch.manual_seed(0)
        hidden = [layer for _ in range(self.hidden) for layer in (nn.ReLU(), nn.Linear(self.width, self.width))]
        layers = [nn.Linear(FEATURES, self.width), *hidden, nn.ReLU(), nn.Linear(self.width, CLASSES)]
        model = (
            PipelineModule(layers, num_stages=2, loss_fn=cross_entropy, partition_method="uniform")
            if self.is_pipeline
            else nn.Sequential(*layers)
        )
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=[*model.parameters()], config=self.config, dist_init_required=False
        )
        return engine

    def train_batch(self, engine: Any, batches: Iterator[Batch]) -> torch.Tensor:
        """Train a micro batch, or all of them with a pipeline, as a user of DeepSpeed writes it."""
        if self.is_pipeline:
            loss: torch.Tensor = engine.train_batch(batches)
            return loss
        inputs, targets = next(batches)
        loss = cross_entropy(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        return loss

    @property
    def calls(self) -> int:
        """Number of calls of `train_batch` per batch."""
        return 1 if self.is_pipeline else self.accumulation


class BareEngine:
    """A loop with DeepSpeed and nothing else."""

    def __init__(self, case: Case, distributed: Distributed) -> None:
        prepare(distributed)
        self._case = case
        self._engine = case.new_engine()
        self._batches = cycle(ready_made_batches())
        self.weights = weights_of(self._engine.module)

    def train(self, count: int) -> list[int]:
        case, engine, batches, times = self._case, self._engine, self._batches, [perf_counter_ns()]
        for _ in range(count):
            for _ in range(case.calls):
                case.train_batch(engine, batches)
            times.append(perf_counter_ns())
        times[-1] = when_done()
        return times


def bare(case: Case, turns: Turns, folder: Path, distributed: Distributed) -> torch.Tensor:
    """Train the bare script, measured as ours is, which shows the cost of measuring."""
    loop = BareEngine(case, distributed)
    for _ in range(turns.batches):
        turns.begin_batch()
        loop.train(1)
    return loop.weights


class Trained(DeepSpeedTrial):
    """A trial as a user writes it."""

    case: Case

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        context.disable_dataset_reproducibility_checks()
        self.engine = context.wrap_model_engine(self.case.new_engine())

    def build_training_data_loader(self) -> Iterable[Batch]:
        return ready_made_batches()

    def build_validation_data_loader(self) -> Sequence[Batch]:
        return ready_made_batches(self.case.accumulation)

    def train_batch(self, dataloader_iter: Iterator[Any] | None, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        assert dataloader_iter is not None
        return {"loss": self.case.train_batch(self.engine, dataloader_iter)}

    def evaluate_batch(self, dataloader_iter: Iterator[Any] | None) -> dict[str, Any]:
        if self.case.is_pipeline:
            return {"loss": self.engine.eval_batch(dataloader_iter)}
        assert dataloader_iter is not None
        inputs, targets = next(dataloader_iter)
        return {"loss": cross_entropy(self.engine(inputs), targets)}


def ours(case: Case, turns: Turns, folder: Path, distributed: Distributed) -> torch.Tensor:
    """Train a whole trial that reports every 100 batches."""

    class InTurns(Trained):
        weights: torch.Tensor

        def __init__(self, context: DeepSpeedTrialContext) -> None:
            super().__init__(context)
            InTurns.weights = weights_of(self.engine.module)

        def build_training_data_loader(self) -> Iterable[Batch]:
            return turns.of(ready_made_batches(), case.accumulation)

    InTurns.case = case
    life = loops.new_life(folder, InTurns, turns.batches, {})
    life.tensorboard = True
    loops.train_life(life, distributed)
    return InTurns.weights
