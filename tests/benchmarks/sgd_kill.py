"""Measure a kill of a rank in training: the time until the driver notices, and until the gang trains again, beside its
start.
"""

from __future__ import annotations

import logging
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hpc_det.sgd import TrainingOperator
from tests.benchmarks.sgd_cases import RANKS, new_trainer, tiny_model
from tests.benchmarks.table import show
from tests.benchmarks.turns import RATE, ready_made_batches
from tests.wait import wait_for

ROUNDS = 5
START_S = 60.0
Times = tuple[float, float, float]
ENOUGH = "enough"
"""The file that ends a training."""


def main() -> None:
    rounds = []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            rounds.append(_times(Path(folder)))
    starts, noticed, again = zip(*rounds, strict=True)
    ratios = [after / start for start, after in zip(starts, again, strict=True)]
    show(
        f"{RANKS} ranks, one of them killed in training, {ROUNDS} rounds, seconds",
        ("until", "min", "median", "max"),
        [
            ("a cold start's first batch on all ranks", *_values(starts)),
            ("the driver has noticed, and ended the others", *_values(noticed)),
            ("a batch is trained on all ranks again", *_values(again)),
            ("the same, as a part of the cold start of its round", *_values(ratios)),
        ],
    )


def _values(values: Sequence[float]) -> list[str]:
    return [f"{value:.2f}" for value in (min(values), statistics.median(values), max(values))]


class Signs(TrainingOperator):
    """Writes a file with the time of its first batch."""

    def setup(self, config: dict[str, Any]) -> None:
        self.folder = Path(config["folder"])
        model = tiny_model()
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=RATE), criterion=nn.CrossEntropyLoss()
        )
        self.register_data(train_loader=Until(self.folder / ENOUGH))
        self.is_first = True

    def train_batch(self, batch: Any, batch_info: Mapping[str, Any]) -> dict[str, Any]:
        result = super().train_batch(batch, batch_info)
        if self.is_first:
            _sign(self.folder, self.world_rank)
        self.is_first = False
        return result


class Until:
    """Yields batches until a file exists. Ranks share what they see, so that all stop at the same batch."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __iter__(self) -> Any:
        batches = ready_made_batches(1)
        while not _any_sees(self._path):
            yield batches[0]


def _any_sees(path: Path) -> bool:
    seen = torch.tensor(float(path.exists()))
    dist.all_reduce(seen)
    return bool(seen)


def _sign(folder: Path, rank: int) -> None:
    now = time.monotonic()
    path = folder / f"{rank}-{os.getpid()}"
    path.with_suffix(".new").write_text(str(now))
    path.with_suffix(".new").rename(path)


def _times(folder: Path) -> Times:
    """Return the seconds of the start, from the kill until it is noticed, and from the kill until the next batch."""
    noticed: list[float] = []
    handler = _When(noticed)
    logging.getLogger("hpc_det.sgd").addHandler(handler)
    began = time.monotonic()
    with new_trainer(Signs, RANKS, config={"folder": str(folder)}) as trainer:
        taken: list[float] = []
        killer = Thread(target=lambda: taken.extend(_kill_one(folder)))
        killer.start()
        trainer.train()
        killer.join()
    logging.getLogger("hpc_det.sgd").removeHandler(handler)
    first, killed, again = taken
    return first - began, noticed[0] - killed, again - killed


class _When(logging.Handler):
    """Records the time of the driver's log message, which it writes after it has ended the other ranks."""

    def __init__(self, times: list[float]) -> None:
        super().__init__()
        self._times = times

    def emit(self, record: logging.LogRecord) -> None:
        self._times.append(time.monotonic())


def _kill_one(folder: Path) -> Times:
    """Return the times at which both ranks trained, at which one was killed, and at which both trained again."""
    first = _signs(folder, RANKS)
    pid = next(path.name.split("-")[1] for path in first if path.name.startswith("1-"))
    killed = time.monotonic()
    os.kill(int(pid), signal.SIGKILL)
    both = _signs(folder, 2 * RANKS)
    (folder / ENOUGH).touch()
    return _last(first), killed, _last(both)


def _signs(folder: Path, count: int) -> list[Path]:
    def found() -> list[Path]:
        return [path for path in folder.glob("?-*") if not path.suffix]

    wait_for(lambda: len(found()) >= count, START_S)
    return found()


def _last(paths: Iterable[Path]) -> float:
    return max(float(path.read_text()) for path in paths)


if __name__ == "__main__":
    main()
