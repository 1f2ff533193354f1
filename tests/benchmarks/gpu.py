"""Benchmarks on a GPU: the loop with a model that keeps it busy, copies of batches to it, and a large checkpoint from
it.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpc_det.checkpoint.checkpoints import CheckpointContext
from hpc_det.checkpoint.committed import committed
from hpc_det.distributed.collectives import Distributed
from hpc_det.pytorch.strategies.device import ToDevice, prefetched
from tests.benchmarks import loops
from tests.benchmarks.loop_overhead import HEADER, cost_of, row
from tests.benchmarks.table import show
from tests.benchmarks.turns import CLASSES, BareLoop, Turns, device, ready_made_batches
from tests.pytorch.trials import StopAt

ROUNDS = 3
PERIODS = 5
WIDTH, LAYERS, RECORDS = 2048, 12, 1024
IMAGES = (64, 3, 224, 224)
PRODUCTS, SIDE = 12, 8192
"""Matrix products in place of the training of one batch of images."""
BATCHES = 40
GIGABYTE_SIDE = 16384
"""A layer of this width has 1.07 GB of weights."""


def main() -> None:
    if not torch.cuda.is_available():
        print("gpu: torch sees no GPU")
        return
    with tempfile.TemporaryDirectory() as root:
        busy_loop(Path(root))
        copies()
        large_checkpoint(Path(root))


# --- the loop


def middle_model() -> nn.Module:
    torch.manual_seed(0)
    hidden = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, CLASSES)).to(device())


class Middle(loops.Linear):
    new_model = staticmethod(middle_model)

    def build_validation_data_loader(self) -> Any:
        return ready_made_batches(1, RECORDS, WIDTH)


def busy_loop(root: Path) -> None:
    batches = ready_made_batches(8, RECORDS, WIDTH)

    def bare(turns: Turns, folder: Path) -> torch.Tensor:
        loop = BareLoop(iter(turns.of(batches)), new_model=middle_model)
        loop.train(turns.batches)
        return loop.weights

    def ours(turns: Turns, folder: Path) -> torch.Tensor:
        return loops.train_trial(folder, turns.of(batches), turns.batches, trial_class=Middle)

    costs = {
        name: [
            cost_of(loop, BareLoop(cycle(batches), new_model=middle_model), PERIODS, root / f"{name} {number}")
            for number in range(ROUNDS)
        ]
        for name, loop in {"the bare loop": bare, "hpc_det": ours}.items()
    }
    show(
        f"{LAYERS} layers of {WIDTH}, batches of {RECORDS}: {ROUNDS} rounds of {PERIODS} times 100 batches, "
        f"microseconds a batch",
        HEADER,
        [row(name, rounds) for name, rounds in costs.items()],
    )


# --- copies


def copies() -> None:
    matrix = torch.randn(SIDE, SIDE, device=device(), dtype=torch.bfloat16)
    pageable = [torch.randn(IMAGES) for _ in range(4)]
    pinned = [batch.pin_memory() for batch in pageable]
    move = ToDevice(device())

    def ahead(batches: Iterable[Any]) -> Iterator[Any]:
        return prefetched(batches, move, device())

    def in_line(batches: Iterable[Any]) -> Iterator[Any]:
        return map(move, batches)

    def there(batches: Iterable[Any]) -> Iterator[Any]:
        on_gpu = [*map(move, pinned)]
        return (on_gpu[0] for _ in batches)

    ways: dict[str, tuple[Callable[[Iterable[Any]], Iterator[Any]], list[Any]]] = {
        "no copy": (there, pinned),
        "pinned, on a separate stream (workers)": (ahead, pinned),
        "pinned, in line (no workers)": (in_line, pinned),
        "not pinned, on a separate stream": (ahead, pageable),
        "not pinned, in line": (in_line, pageable),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS + 1):
        for name, (way, batches) in ways.items():
            taken[name].append(_milliseconds_a_batch(way(batches[k % len(batches)] for k in range(BATCHES)), matrix))
    medians = {name: statistics.median(times[1:]) for name, times in taken.items()}
    least, size = medians["no copy"], pinned[0].nbytes / 1e6
    show(
        f"batches of {size:.0f} MB, each trained with {PRODUCTS} matrix products, median of {ROUNDS} times {BATCHES}",
        ("way", "ratio to no copy", "milliseconds a batch"),
        [(name, f"{median / least:.3f}", f"{median:.2f}") for name, median in medians.items()],
    )


def _milliseconds_a_batch(batches: Iterator[Any], matrix: torch.Tensor) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for batch in batches:
        batch.mul_(1.0)
        for _ in range(PRODUCTS):
            torch.mm(matrix, matrix)
        del batch
    torch.cuda.synchronize()
    return (time.perf_counter() - began) * 1e3 / BATCHES


# --- a checkpoint


class Notified(StopAt):
    """Records when the loop was asked to stop, after ten batches."""

    at = 0.0

    def should_stop(self) -> bool:
        stops = super().should_stop()
        self.at = self.at or (time.time() if stops else 0.0)
        return stops


def gigabyte_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(GIGABYTE_SIDE, GIGABYTE_SIDE).to(device())


class Gigabyte(loops.Linear):
    new_model = staticmethod(gigabyte_model)

    def build_validation_data_loader(self) -> Any:
        return ready_made_batches(1, 32, GIGABYTE_SIDE)


def large_checkpoint(root: Path) -> None:
    content = {"weights": gigabyte_model().state_dict()}
    size = sum(weight.nbytes for weight in content["weights"].values()) / 1e9
    checkpoints = root / "saved"
    checkpoints.mkdir()
    ways: dict[str, Callable[[int], float]] = {
        "torch.save and fsync": lambda number: _seconds(lambda: _plain_save(content, root / "plain.pth")),
        "the same, committed with checksums": lambda number: _seconds(
            lambda: CheckpointContext(checkpoints, Distributed()).save(number, {"state_dict.pth": content}, _nothing)
        ),
        "from the notice in a training loop to the committed checkpoint": lambda number: _notice(root / f"{number}"),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS):
        for name, way in ways.items():
            taken[name].append(way(number))
    least = statistics.median(taken["torch.save and fsync"])
    show(
        f"{size:.2f} GB of weights on a GPU, {ROUNDS} rounds",
        ("what", "ratio", "median [s]", "max [s]"),
        [
            (name, f"{statistics.median(times) / least:.2f}", f"{statistics.median(times):.3f}", f"{max(times):.3f}")
            for name, times in taken.items()
        ],
    )


def _seconds(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _plain_save(content: Any, path: Path) -> None:
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


def _nothing(folder: Path) -> None:
    return None


def _notice(folder: Path) -> float:
    stop = Notified(10)
    batches = ready_made_batches(4, 32, GIGABYTE_SIDE)
    life = loops.new_life(folder, loops.with_data(Gigabyte, batches * 5), 1000)
    life.attempt(stop)
    (checkpoint,) = committed(life.folder.checkpoints)
    return checkpoint.time - stop.at


if __name__ == "__main__":
    main()
