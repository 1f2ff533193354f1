"""Two loops of one process that train in turns, so that the machine's noise affects both alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice, pairwise
from time import perf_counter_ns
from typing import Protocol

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hpc_det.distributed.collectives import Distributed

Batch = tuple[torch.Tensor, torch.Tensor]
Turn = list[float]
"""Microseconds of each batch."""

PERIOD = 100
"""Batches between two reports of the measured loop."""
WARM_UP = 2 * PERIOD
"""Batches that are not counted: modules are imported and caches filled."""
FEATURES, CLASSES, RECORDS = 32, 10, 32
RATE = 0.05


def device() -> torch.device:
    """Return the GPU if there is one, as for a trial."""
    return Distributed().device


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(FEATURES, CLASSES).to(device())


def ready_made_batches(count: int = 64, records: int = RECORDS, features: int = FEATURES) -> list[Batch]:
    """Return batches that are already on the device."""
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(records, features, generator=generator).to(device()),
            torch.randint(CLASSES, (records,), generator=generator).to(device()),
        )
        for _ in range(count)
    ]


def weights_of(model: nn.Module) -> torch.Tensor:
    """Return the weights of the first layer, whose gradients depend on all others."""
    return next(model.parameters())


class Bare(Protocol):
    """A loop with nothing but the training."""

    weights: torch.Tensor

    def train(self, count: int) -> list[int]:
        """Train this number of batches; return the times [ns] before the first and after each."""
        ...


class BareLoop:
    """A loop with PyTorch and nothing else."""

    def __init__(
        self,
        batches: Iterator[Batch],
        wrap: Callable[[nn.Module], nn.Module] | None = None,
        new_model: Callable[[], nn.Module] = new_model,
    ) -> None:
        """`wrap`: for example DistributedDataParallel."""
        model = new_model()
        self.weights = weights_of(model)
        self._model = wrap(model) if wrap else model
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=RATE)
        self._batches = batches

    def train(self, count: int) -> list[int]:
        model, optimizer, times = self._model, self._optimizer, [perf_counter_ns()]
        for inputs, targets in islice(self._batches, count):
            loss = cross_entropy(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            times.append(perf_counter_ns())
        times[-1] = when_done()
        return times


class Turns:
    """Lets the bare loop train its turn when the measured loop asks for the first batch of its turn.

    The measured loop calls `begin_batch` whenever it asks for a batch. At the end both have trained `batches` batches.
    """

    def __init__(self, bare: Bare, periods: int, turn: int = PERIOD) -> None:
        """`turn`: batches, a divisor of PERIOD. It must outlast the work that a report leaves to other threads."""
        self.bare = bare
        self.batches = periods * PERIOD
        self._turn = turn
        self._turns = self.batches // turn - 1
        self._times = [0] * (turn // 2)
        """The request time of each batch of the current turn. The first turn starts half over, which puts reports in
        the middle of turns.
        """
        self._cost = Cost([], [])

    def begin_batch(self) -> None:
        if len(self._times) == self._turn:
            self._change()
        self._times.append(perf_counter_ns())

    def of(self, batches: Sequence[Batch], per_batch: int = 1) -> Timed:
        """Return the batches of the measured loop: `batches`, repeated. `per_batch`: number of them for one batch."""
        return Timed(self, batches, per_batch)

    @property
    def cost(self) -> Cost:
        first = WARM_UP // self._turn
        return Cost(self._cost.bare[first:], self._cost.measured[first:])

    def _change(self) -> None:
        """Let the bare loop train: the measured loop has trained its half turn, or one more turn."""
        times, done = [*self._times, when_done()], len(self._cost.bare)
        if done:
            self._cost.measured.append(_microseconds(times))
        if done in (0, self._turns):
            self.bare.train(self._turn // 2)
        if done < self._turns:
            self._cost.bare.append(_microseconds(self.bare.train(self._turn)))
        self._times = []


class Timed:
    def __init__(self, turns: Turns, batches: Sequence[Batch], per_batch: int) -> None:
        self._turns = turns
        self._batches = batches
        self._per_batch = per_batch

    def __len__(self) -> int:
        return self._turns.batches * self._per_batch

    def __iter__(self) -> Iterator[Batch]:
        for number, batch in enumerate(islice(cycle(self._batches), len(self))):
            if not number % self._per_batch:
                self._turns.begin_batch()
            yield batch


def when_done() -> int:
    """Return the time [ns], after the GPU has completed its work, so that no turn includes work of the other loop."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return perf_counter_ns()


def _microseconds(times: list[int]) -> Turn:
    return [(after - before) / 1000 for before, after in pairwise(times)]


@dataclass(frozen=True)
class Cost:
    """The batches' times in the bare loop and in the measured loop, turn by turn."""

    bare: list[Turn]
    measured: list[Turn]

    @property
    def bare_us(self) -> float:
        """The median batch."""
        return statistics.median(chain(*self.bare))

    @property
    def measured_us(self) -> float:
        return statistics.median(chain(*self.measured))

    @property
    def added_us(self) -> float:
        """The addition to the median batch of a turn: the median of all turns."""
        return statistics.median(
            statistics.median(measured) - statistics.median(bare)
            for bare, measured in zip(self.bare, self.measured, strict=True)
        )

    @property
    def added(self) -> float:
        """`added_us` as a share of the bare loop's median batch: a slow machine slows both."""
        return self.added_us / self.bare_us

    @property
    def mean_added_us(self) -> float:
        """The addition to the mean batch of a period, which includes the report."""
        return _mean(self.measured) - _mean(self.bare)

    @property
    def ratio(self) -> float:
        """The ratio of whole periods."""
        return _mean(self.measured) / _mean(self.bare)


def _mean(turns: list[Turn]) -> float:
    """Return the mean, over the places in a period, of the median at each place, which ignores disturbances of single
    batches.
    """
    batches = [*chain(*turns)]
    return statistics.fmean(statistics.median(batches[place::PERIOD]) for place in range(PERIOD))
