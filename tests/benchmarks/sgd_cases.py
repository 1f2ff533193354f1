"""The trainings of TorchTrainer's benchmarks: by an operator with the default loops, and by bare loops beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle
from time import perf_counter_ns
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpc_det.sgd import TorchTrainer, TrainingOperator
from tests.benchmarks.turns import CLASSES, FEATURES, RATE, RECORDS, BareLoop, Batch, ready_made_batches, when_done

RANKS = 2
WIDTH, LAYERS, MANY_RECORDS = 512, 3, 64


@dataclass(frozen=True)
class Case:
    name: str
    turn: int
    """Batches; a divisor of a hundred."""
    turns: int
    """Number of turns in a round."""
    new_model: Callable[[], nn.Module]
    records: int
    features: int

    def batches(self) -> list[Batch]:
        return ready_made_batches(8, self.records, self.features)

    def bare_loop(self) -> BareLoop:
        return BareLoop(cycle(self.batches()), DistributedDataParallel, self.new_model)


def tiny_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(FEATURES, CLASSES)


def middle_model() -> nn.Module:
    torch.manual_seed(0)
    hidden = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, CLASSES))


CASES = {
    case.name: case
    for case in (
        Case("one tiny layer", 100, 3, tiny_model, RECORDS, FEATURES),
        Case(f"{LAYERS} layers of {WIDTH}", 20, 5, middle_model, MANY_RECORDS, WIDTH),
    )
}


class Stepper(TrainingOperator):
    """The default train_epoch and train_batch, with the time at which each batch was requested."""

    def setup(self, config: dict[str, Any]) -> None:
        case = CASES[config["case"]]
        model = case.new_model()
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=RATE), criterion=nn.CrossEntropyLoss()
        )
        self.times: list[int] = []
        self.register_data(train_loader=Clocked(case.batches(), self.times))

    def train_epoch(
        self,
        iterator: Iterable[Any],
        info: Mapping[str, Any] | None = None,
        num_steps: int | None = None,
        epoch_idx: int = 0,
    ) -> dict[str, Any]:
        self.times.clear()
        result = super().train_epoch(iterator, info, num_steps, epoch_idx)
        self.times.append(when_done())
        return result


class Clocked:
    """Yields batches without an end, and records the times of the requests."""

    def __init__(self, batches: list[Batch], times: list[int]) -> None:
        self._batches = batches
        self._times = times

    def __iter__(self) -> Iterator[Batch]:
        for batch in cycle(self._batches):
            self._times.append(perf_counter_ns())
            yield batch


def times_of(operator: TrainingOperator) -> list[int]:
    """Return the times of the last turn [ns]: before the first batch and after each."""
    assert isinstance(operator, Stepper)
    return operator.times


class Empty(TrainingOperator):
    """Trains nothing; its model has config["tensors"] tensors of config["megabytes"] MiB each, or hardly any
    weights.
    """

    def setup(self, config: dict[str, Any]) -> None:
        rows = 512 * config.get("megabytes", 0)
        layers = [nn.Linear(512, rows, bias=False) for _ in range(config.get("tensors", 0))]
        model = nn.Sequential(*layers, nn.Linear(4, 4))
        self.register(models=model, optimizers=torch.optim.SGD(model.parameters(), lr=RATE))
        self.register_data(train_loader=[None])

    def train_epoch(
        self,
        iterator: Iterable[Any],
        info: Mapping[str, Any] | None = None,
        num_steps: int | None = None,
        epoch_idx: int = 0,
    ) -> dict[str, Any]:
        return {}


def new_trainer(operator: type[TrainingOperator], ranks: int, **arguments: Any) -> TorchTrainer:
    """Return a trainer on this machine's CPUs, also if there are GPUs."""
    return TorchTrainer(training_operator_cls=operator, num_workers=ranks, executor="local", use_gpu=False, **arguments)
