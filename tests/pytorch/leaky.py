"""A trial that resumes exactly, and trials that differ from it in one aspect."""

from __future__ import annotations

import io
import itertools
import logging
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset
from tqdm import tqdm

from hpc_det.pytorch import DataLoader, LRScheduler, MetricReducer, PyTorchCallback, PyTorchTrial, PyTorchTrialContext


class Points(Dataset[Any]):
    """24 points; the trial uses batches of 4."""

    def __init__(self, noise: Callable[[], float] = lambda: 0.0) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(4, generator=generator) + self.noise(), torch.randn(1, generator=generator)


class Sound(PyTorchTrial):
    workers = 0

    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        self.prepare()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), self.layer(), nn.Linear(8, 1))
        self.model: Any = context.wrap_model(self.net)
        self.optimizer = context.wrap_optimizer(torch.optim.Adam(self.model.parameters(), lr=0.01))
        self.begin()

    def prepare(self) -> None:
        """Override to change the context before it wraps the model."""

    def layer(self) -> nn.Module:
        return nn.Identity()

    def begin(self) -> None:
        """Override to create state after the model and the optimizer are wrapped."""

    def factor(self) -> Any:
        """Return the factor of the loss of a batch."""
        return 1.0

    def after_batch(self, loss: torch.Tensor) -> None: ...

    def data(self) -> Points:
        return Points()

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(self.data(), batch_size=4, shuffle=True, num_workers=self.workers)

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(Points(), batch_size=8)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        points, values = batch
        loss = nn.functional.mse_loss(self.model(points), values) * self.factor()
        self.step(loss)
        self.after_batch(loss)
        return {"loss": loss}

    def step(self, loss: torch.Tensor) -> None:
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        points, values = batch
        return {"error": nn.functional.mse_loss(self.model(points), values)}


# --- state that a resume loses


class TorchGenerator(Sound):
    def begin(self) -> None:
        self.generator = torch.Generator().manual_seed(7)

    def factor(self) -> Any:
        return torch.rand((), generator=self.generator)


class NumpyGenerator(Sound):
    def begin(self) -> None:
        self.generator = np.random.default_rng(7)

    def factor(self) -> Any:
        return self.generator.random()


class PythonGenerator(Sound):
    def begin(self) -> None:
        self.generator = random.Random(7)

    def factor(self) -> Any:
        return self.generator.random()


class Counter(Sound):
    def begin(self) -> None:
        self.count = 0

    def factor(self) -> Any:
        self.count += 1
        return self.count


class Average(Sound):
    """The lost state affects only the validation."""

    def begin(self) -> None:
        self.average = 0.0

    def after_batch(self, loss: torch.Tensor) -> None:
        self.average = 0.9 * self.average + 0.1 * loss.item()

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        return {"error": super().evaluate_batch(batch)["error"] + self.average}


class UnwrappedOptimizer(Sound):
    def begin(self) -> None:
        self.second = torch.optim.Adam(self.model.parameters(), lr=0.01)

    def step(self, loss: torch.Tensor) -> None:
        self.context.backward(loss)
        self.second.step()
        self.context.step_optimizer(self.optimizer)


class UnwrappedModule(Sound):
    def begin(self) -> None:
        self.scale = nn.Linear(1, 1)

    def factor(self) -> Any:
        with torch.no_grad():
            self.scale.weight += 1
        return self.scale(torch.ones(1)).item()


class UnwrappedScheduler(Sound):
    def begin(self) -> None:
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=7, gamma=0.5)

    def after_batch(self, loss: torch.Tensor) -> None:
        self.schedule.step()


class UnwrappedScaler(Sound):
    def begin(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)

    def step(self, loss: torch.Tensor) -> None:
        self.context.backward(self.scaler.scale(loss))
        self.context.step_optimizer(self.optimizer, scaler=self.scaler)
        self.scaler.update()

    def factor(self) -> Any:
        return self.scaler.get_scale()


class OwnScaler(Sound):
    """Has the function of a GradScaler, but another class."""

    class Scale:
        def __init__(self) -> None:
            self.scale, self.steps = 4.0, 0

        def update(self) -> None:
            self.steps += 1
            self.scale *= 2 if self.steps % 3 == 0 else 1

    def begin(self) -> None:
        self.scale = self.Scale()

    def factor(self) -> Any:
        self.scale.update()
        return self.scale.scale


class ForgetfulCallback(PyTorchCallback):
    def __init__(self) -> None:
        self.epochs = 1

    def on_training_epoch_end(self, epoch_idx: int) -> None:
        self.epochs += 1


class CallbackWithoutState(Sound):
    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        self.callback = ForgetfulCallback()
        return {"epochs": self.callback}

    def factor(self) -> Any:
        return self.callback.epochs


class LayerWithACounter(Sound):
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            self.calls += self.training
            return values * self.calls

    def layer(self) -> nn.Module:
        return self.Growing()


class Closure(Sound):
    def begin(self) -> None:
        count = 0

        def factor() -> int:
            nonlocal count
            count += 1
            return count

        self.factor = factor  # type: ignore[method-assign]


class RunningGenerator(Sound):
    def begin(self) -> None:
        def numbers() -> Iterator[int]:
            number = 1
            while True:
                yield number
                number += 1

        self.numbers = numbers()

    def factor(self) -> Any:
        return next(self.numbers)


class SecondLoader(Sound):
    def begin(self) -> None:
        self.others = iter(torch.utils.data.DataLoader(torch.arange(1.0, 100.0)))  # type: ignore[arg-type]

    def factor(self) -> Any:
        return next(self.others).item()


class GlobalVariable(Sound):
    def factor(self) -> Any:
        global batches
        batches += 1
        return batches


batches = 0


class ClassAttribute(Sound):
    made = 0

    def factor(self) -> Any:
        ClassAttribute.made += 1
        return self.made


class Cycle(Sound):
    """The position of an itertools.cycle cannot be read."""

    def begin(self) -> None:
        self.factors = itertools.cycle([1, 2, 3, 4, 5, 6, 7])

    def factor(self) -> Any:
        return next(self.factors)


class NoisyData(Sound):
    def data(self) -> Points:
        generator = random.Random(3)
        points = Points()
        points.noise = generator.random
        return points


class NoiseOfWorkers(Sound):
    """A new worker process starts with a new generator."""

    workers = 1

    def data(self) -> Points:
        return Points(random.Random(3).random)


class Buffer(Sound):
    class Mean(nn.Module):
        mean: torch.Tensor

        def __init__(self, persistent: bool) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(8), persistent)

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.mean.mul_(0.9).add_(0.1 * values.detach().mean(0))
            return values - self.mean

    def layer(self) -> nn.Module:
        return self.Mean(persistent=False)


class DrawingAtTheStart(Sound):
    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        class Drawing(PyTorchCallback):
            def on_training_start(self) -> None:
                torch.rand(1)

        return {"drawing": Drawing()}


# --- trainings that differ without any stop


class Time(Sound):
    def factor(self) -> Any:
        return 1 + time.monotonic_ns() % 1000 / 1000


class NoisyKernel(Sound):
    """The gradients vary slightly, as a sum does that is added up in no fixed order."""

    class Sum(nn.Module):
        class Noisy(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
                return values.clone()

            @staticmethod
            def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
                return gradients[0] * (1 + 1e-3 * random.SystemRandom().random())

        def forward(self, values: torch.Tensor) -> Any:
            return self.Noisy.apply(values)  # type: ignore[no-untyped-call]

    def layer(self) -> nn.Module:
        return self.Sum()


class NoisyKernelAndAverage(NoisyKernel):
    """An attribute that influences nothing must not be reported as the cause."""

    def begin(self) -> None:
        self.count = 0

    def after_batch(self, loss: torch.Tensor) -> None:
        self.count += 1


class UnseededGenerator(Sound):
    def data(self) -> Points:
        points = Points()
        self.generator = np.random.default_rng()
        points.noise = self.generator.random
        return points


class UnseededWorker(Sound):
    workers = 1

    def data(self) -> Points:
        return Points(lambda: int.from_bytes(os.urandom(1)) / 256)


# --- sound ones


class AverageInABuffer(Buffer):
    def layer(self) -> nn.Module:
        return self.Mean(persistent=True)


class WrappedSchedulerAndScaler(UnwrappedScaler):
    def prepare(self) -> None:
        super().begin()
        self.scaler = self.context.wrap_scaler(self.scaler)

    def begin(self) -> None:
        schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=7, gamma=0.5)
        self.context.wrap_lr_scheduler(schedule, LRScheduler.StepMode.STEP_EVERY_BATCH)


class CallbackWithState(CallbackWithoutState):
    class Remembering(ForgetfulCallback):
        def state_dict(self) -> dict[str, Any]:
            return {"epochs": self.epochs}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.epochs = state_dict["epochs"]

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        self.callback = self.Remembering()
        return {"epochs": self.callback}


class NoiseOfTorch(Sound):
    """Noise from generators that are seeded for each worker and saved for each rank."""

    workers = 1

    def data(self) -> Points:
        return Points(lambda: random.random() + np.random.random() + torch.rand(()).item())

    def factor(self) -> Any:
        return 1 + random.random() + np.random.random() + torch.rand(())


class WithReducers(Sound):
    """One reducer keeps the values of the last validation, which no checkpoint contains; the values of training are
    saved.
    """

    class Collected(MetricReducer):
        def __init__(self) -> None:
            self.values: list[float] = []

        def reset(self) -> None:
            self.values = []

        def per_slot_reduce(self) -> Any:
            return self.values

        def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> Any:
            return sum(map(sum, per_slot_metrics))

    def begin(self) -> None:
        self.trained, self.validated = self.Collected(), self.Collected()
        self.context.wrap_reducer(self.trained, "sum")
        self.context.wrap_reducer(self.validated, "records", for_training=False)

    def after_batch(self, loss: torch.Tensor) -> None:
        self.trained.values.append(loss.item())

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        for reducer in (self.trained, self.validated):
            reducer.values.append(len(batch))
        return super().evaluate_batch(batch)


class Everyday(Sound):
    """Keeps typical objects that differ from run to run, and still trains identically."""

    def begin(self) -> None:
        self.started, self.tick, self.elapsed = time.time(), time.monotonic(), 0.0
        self.id, self.folder = os.getpid(), tempfile.gettempdir() + os.urandom(4).hex()
        self.logger, self.lock, self.event = logging.getLogger("everyday"), threading.Lock(), threading.Event()
        self.file, self.bar = io.StringIO(), tqdm(disable=True)
        self.cache: dict[Any, float] = {}
        self.objects = {object(), object()}
        self.times: list[float] = []
        self.norms = np.zeros(3)
        self.meta = torch.zeros(3, device="meta")
        self.teacher = nn.Linear(4, 1)

    def after_batch(self, loss: torch.Tensor) -> None:
        self.elapsed += time.monotonic() - self.tick
        self.tick = time.monotonic()
        self.times.append(self.elapsed)
        self.cache[len(self.cache), self.elapsed] = loss.item()
        self.file.write("a line\n")
        self.bar.update()
