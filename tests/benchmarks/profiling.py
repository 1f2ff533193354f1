"""Measure what profiling adds to a batch: the loop with `profiling.enabled`, in turns with the same loop without it."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from time import perf_counter_ns

import torch
from torch import nn

from hpc_det.config.merge import merge
from hpc_det.core.system_metrics import BufferedLines, SystemMetrics
from hpc_det.core.timer import Timer
from hpc_det.distributed.collectives import Distributed
from hpc_det.pytorch import PyTorchTrial
from hpc_det.pytorch.strategies.device import ToDevice
from tests.benchmarks.loop_overhead import row, silence
from tests.benchmarks.loops import Linear, new_life, train_life, with_data
from tests.benchmarks.table import show
from tests.benchmarks.turns import CLASSES, PERIOD, Batch, Cost, Turns, ready_made_batches

ROUNDS, PERIODS, PERIODS_OF_LARGER = 7, 60, 12
LOOKS = 100
HEADER = ("measured", "without", "with it", "added", "added, with reports", "ratio, with reports (quartiles of rounds)")
LARGER_RECORDS, LARGER_FEATURES = 64, 512


def larger_model() -> nn.Module:
    """Return a model whose batches take one or two milliseconds of a core."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(LARGER_FEATURES, LARGER_FEATURES), nn.ReLU(), nn.Linear(LARGER_FEATURES, CLASSES))


class Larger(Linear):
    new_model = staticmethod(larger_model)

    def build_validation_data_loader(self) -> list[Batch]:
        return larger_batches(1)


larger_batches = partial(ready_made_batches, records=LARGER_RECORDS, features=LARGER_FEATURES)


def main() -> None:
    torch.set_num_threads(1)
    small = partial(cost_of, Linear, ready_made_batches, PERIODS)
    larger = partial(cost_of, Larger, larger_batches, PERIODS_OF_LARGER)
    kinds: dict[str, Callable[[Path], Cost]] = {
        "a small model, measured in neither: the noise": partial(small, False),
        "a small model": partial(small, True),
        "a larger model, measured in neither: the noise": partial(larger, False),
        "a larger model": partial(larger, True),
    }
    costs: dict[str, list[Cost]] = {name: [] for name in kinds}
    with tempfile.TemporaryDirectory() as root:
        for number in range(ROUNDS):
            for name, measured in kinds.items():
                costs[name].append(measured(Path(root, f"{name} {number}")))
        look_ms = look_s(Path(root)) * 1000
    show(
        f"one rank, {ROUNDS} rounds of {PERIODS} (larger: {PERIODS_OF_LARGER}) times 100 batches, microseconds a batch",
        HEADER,
        [row(name, rounds) for name, rounds in costs.items()],
    )
    print(f"\nThe timers of a batch alone, at best: {timers_us():.2f} us.")
    print(f"A look at the node, once a second in a separate thread: {look_ms:.2f} ms of a core.")


def cost_of(
    trial_class: type[PyTorchTrial], batches: Callable[[], list[Batch]], periods: int, measures: bool, folder: Path
) -> Cost:
    """Return the cost. Raises AssertionError if the trainings of the loops differ."""
    folder.mkdir()
    other = Other(batches(), periods * PERIOD)
    turns = Turns(other, periods)
    with silence():
        other.begin(lambda: train(trial_class, other, len(other), folder / "without"))
        weights = train(trial_class, turns.of(batches()), turns.batches, folder / "with", measures=measures)
    assert torch.equal(weights, other.weights), "the loops do not train the same"
    return turns.cost


def train(
    trial_class: type[PyTorchTrial], loader: Iterable[Batch], batches: int, folder: Path, *, measures: bool = False
) -> torch.Tensor:
    """Train, and return the weights of the checkpoint."""
    torch.set_num_threads(1)  # each Python thread has its own setting
    life = new_life(folder, with_data(trial_class, loader), batches)
    if measures:
        life.config = merge({**life.config}, {"profiling": {"enabled": True}})
    train_life(life, Distributed())
    models: list[dict[str, torch.Tensor]] = life.newest["state_dict.pth"]["models_state_dict"]
    return next(iter(models[0].values()))


class Other:
    """The batches of a loop in another thread, which trains as many as `train` asks for, then waits."""

    weights: torch.Tensor

    def __init__(self, batches: list[Batch], count: int) -> None:
        self._batches = batches
        self._count = count
        self._left = 0
        self._times: list[int] = []
        self._asked, self._done = threading.Semaphore(0), threading.Semaphore(0)

    def begin(self, train: Callable[[], torch.Tensor]) -> None:
        """Start the thread, and wait until it reaches its first batch."""
        self._thread = threading.Thread(target=self._run, args=[train], daemon=True)
        self._thread.start()
        self._done.acquire()

    def train(self, count: int) -> list[int]:
        self._left = count
        self._asked.release()
        self._done.acquire()
        return self._times

    def _run(self, train: Callable[[], torch.Tensor]) -> None:
        self.weights = train()
        self._done.release()

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches; a request for the next batch shows that the one before is trained."""
        for batch in islice(cycle(self._batches), self._count):
            self._times.append(perf_counter_ns())
            if not self._left:
                self._done.release()
                self._asked.acquire()
                self._times = [perf_counter_ns()]
            self._left -= 1
            yield batch


def timers_us() -> float:
    """Return the microseconds per batch of the timers, from batches without any other work, in the best of
    100 turns.
    """
    timer = Timer()
    timer.start()
    move = ToDevice(torch.device("cpu"))
    batches = cycle(ready_made_batches(1))
    timed = map(timer.timed("to_device", move), timer.timed_batches("dataloader_next", batches))
    plain = map(move, batches)
    turns = [(_turn_us(timed), _turn_us(plain)) for _ in range(100)]
    return min(with_it for with_it, _ in turns) - min(without for _, without in turns)


def _turn_us(batches: Iterator[Batch], count: int = 1000) -> float:
    began = perf_counter_ns()
    for _ in islice(batches, count):
        pass
    return (perf_counter_ns() - began) / count / 1000


def look_s(folder: Path) -> float:
    """Return the seconds of a core that one look takes, as the mean of LOOKS."""
    system = SystemMetrics(BufferedLines(folder / "system.jsonl"), {})
    system.close()
    began = time.process_time()
    for _ in range(LOOKS):
        system.look()
    return (time.process_time() - began) / LOOKS


if __name__ == "__main__":
    main()
