"""A script that trains with Hugging Face's Trainer and stops itself: the subject of test_transformers.py."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset, IterableDataset
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import hpc_det.core
from hpc_det.core import Core
from hpc_det.integrations.transformers import HpcDetCallback, training_arguments
from tests.integrations.searched import searched

RECORDS = 48
BEFORE_THE_FIRST = -1


def record(index: int) -> dict[str, torch.Tensor]:
    x = torch.randn(4, generator=torch.Generator().manual_seed(index))
    return {"x": x, "labels": x.sum()[None]}


class Records(Dataset[dict[str, torch.Tensor]]):
    """48 records; `noise` adds random numbers of the process's generators to each."""

    def __init__(self, noise: float = 0.0, count: int = RECORDS) -> None:
        self.noise, self.count = noise, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        found = record(index)
        if self.noise:
            found["x"] = found["x"] + self.noise * torch.randn(4) + self.noise * random.random()
        return found


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """The same records without a length."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return map(record, range(RECORDS))


class Net(nn.Module):
    """A small regression that records which records it has seen."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 1))
        self.seen: list[float] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self.seen.append(float(x.sum()))
        return {"loss": (self.layers(x) - labels).square().mean(), "logits": labels}


class Stops(TrainerCallback):  # type: ignore[misc]
    """Sends SIGTERM to rank 0 in a step, and lets every rank wait until it knows, so that this step is the last one."""

    def __init__(self, core: Core, at: int) -> None:
        """`at`: the step; BEFORE_THE_FIRST: before the first step."""
        self.core, self.at = core, at

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.at == BEFORE_THE_FIRST:
            self._stop()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step == self.at:
            self._stop()

    def _stop(self) -> None:
        if self.core.distributed.is_chief:
            os.kill(os.getpid(), signal.SIGTERM)
        while not self.core._run.stop.noticed:
            time.sleep(0.001)


def main(
    result: str,
    *,
    stop_at: int = 0,
    dropout: float = 0.2,
    noise: float = 0.0,
    data: str = "records",
    config: dict[str, Any] | None = None,
    resumes: bool = True,
    fails: bool = False,
    links: bool = True,
    lengths: list[int] | None = None,
    pauses_at: int = 0,
    **options: Any,
) -> None:
    """Train until the end or until the stop, and write what became of it to `result`-RANK.json.

    `lengths` and `pauses_at`: see tests.integrations.searched.
    """
    torch.set_num_threads(1)
    if lengths:
        with searched(Path(result).with_name("reported.json"), lengths, pauses_at):
            main(
                result, dropout=dropout, noise=noise, data=data, config=config, resumes=resumes, fails=fails, **options
            )
        return
    settings = {"reproducibility": {"experiment_seed": 3}, **(config or {})}
    with hpc_det.core.init(config=settings, name="hf") as core:
        arguments: dict[str, Any] = {
            **training_arguments(core),
            "per_device_train_batch_size": 8 // core.distributed.size,
            "logging_steps": 1,
            "num_train_epochs": 3,
            "save_strategy": "no",
            "use_cpu": True,
            "report_to": "none",
            "disable_tqdm": True,
            "learning_rate": 0.01,
            **training_arguments(core),
            **options,
        }
        model = Net(dropout)
        trainer = Trainer(
            model,
            TrainingArguments(**arguments),
            train_dataset=Stream() if data == "stream" else Records(noise),
            eval_dataset=Records(count=16),
            callbacks=[Stops(core, stop_at), HpcDetCallback(core)],
        )
        if not links:
            os.link = no_link
        trainer.train(resume_from_checkpoint=core.latest_checkpoint if resumes else None)
        if fails:
            raise RuntimeError("after the training")
        write(core, result, trainer.model, trainer.state, seen=model.seen)


def no_link(*arguments: Any, **options: Any) -> None:
    raise OSError("no hard links here")


def write(core: Core, result: str, model: nn.Module, state: TrainerState, **more: Any) -> None:
    whole = (each.full_tensor() if isinstance(each, DTensor) else each for each in model.parameters())
    weights = b"".join(each.detach().numpy().tobytes() for each in whole)
    content = {
        "step": state.global_step,
        "stop": core.should_stop().reason,
        "weights": hashlib.sha1(weights).hexdigest(),
        "folder": str(core.info.folder),
        "checkpoint": core.latest_checkpoint and str(core.latest_checkpoint),
        "best": state.best_model_checkpoint,
        **more,
    }
    Path(f"{result}-{core.distributed.rank}.json").write_text(json.dumps(content))
