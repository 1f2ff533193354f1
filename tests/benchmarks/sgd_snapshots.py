"""Measure how long the snapshot after each train() blocks it, and when it is durable, beside bare copies of the same
bytes.

The floors are of the same round: one copy into warm memory, in the rank, and a bare write with fsync into the folder of
the run. Ratios are medians of the ratios of the rounds.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hpc_det.sgd import TorchTrainer, TrainingOperator
from hpc_det.sgd.driver.elastic import ElasticGang
from hpc_det.store.run_folder import RunFolder
from tests.benchmarks.sgd_cases import Empty, new_trainer
from tests.benchmarks.table import show
from tests.wait import wait_for

STATES = ((100, 1), (64, 16), (1024, 1))
"""Number of tensors, and MiB of each."""
ROUNDS, WARM_UP = 5, 2
BLOCK = 2**22
DURABLE_S = 300.0


def main() -> None:
    measured = {f"{tensors} of {size} MiB": _measured(tensors, size) for tensors, size in STATES}
    show(
        f"an empty train() of one rank with its snapshot, {ROUNDS} rounds in turns, milliseconds, ratios to the copy",
        ("weights", "a copy", "train()", "ratio", "while the one before is written", "torch.save and fsync"),
        [(weights, *_ms(taken, "copy", "train"), *_stalls(taken)) for weights, taken in measured.items()],
    )
    show(
        "the same snapshots on their way to the disk, and a notice's, beside a copy and a bare write",
        ("weights", "bare write and fsync", "", "until it is durable", "ratio", "from notice to durable", "ratio"),
        [
            (weights, how, *_ms(taken, bare), *_on_disk(taken, bare))
            for weights, taken in measured.items()
            for how, bare in (("as it is", "write"), ("with O_DIRECT", "direct"))
        ],
    )


def _measured(tensors: int, megabytes: int) -> dict[str, list[float]]:
    """Return the seconds of each round."""
    taken: dict[str, list[float]] = {}
    config = {"tensors": tensors, "megabytes": megabytes}
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(Path(folder) / "run")
        with new_trainer(Empty, 1, run=run.path, config=config) as trainer:
            content = memoryview(mmap.mmap(-1, tensors * megabytes << 20))
            content[:] = os.urandom(2**20) * (tensors * megabytes)
            for _ in range(WARM_UP + ROUNDS):
                for name, seconds in _round(trainer, Path(folder) / "bare", content).items():
                    taken.setdefault(name, []).append(seconds)
    return {name: times[WARM_UP:] for name, times in taken.items()}


def _round(trainer: TorchTrainer, path: Path, content: memoryview) -> dict[str, float]:
    gang = trainer._gang
    assert gang
    copies = trainer.apply_all_operators(lambda operator: bare_copies(operator, path))[0]
    bare = {"write": _seconds(lambda: _bare_write(path, content, 0))}
    bare["direct"] = _seconds(lambda: _bare_write(path, content, os.O_DIRECT))
    train = _seconds(trainer.train)
    durable = _seconds(lambda: _await_durable(gang))
    trainer.train()
    busy = _seconds(trainer.train)
    _await_durable(gang)
    trainer.train()
    # The scheduler's notice comes while a snapshot is being written and a call is about to end.
    notice = _seconds(trainer.train) + _seconds(gang._settle)
    return {**copies, **bare, "train": train, "durable": durable, "busy": busy, "notice": notice}


def _await_durable(gang: ElasticGang) -> None:
    """Wait until the snapshot in flight is durable: a snapshot is kept when the one before is, and the next call
    requests it.
    """

    def is_kept() -> bool:
        gang._gang.poll()
        return gang._keeping is None

    wait_for(is_kept, DURABLE_S)


def bare_copies(operator: TrainingOperator, path: Path) -> dict[str, float]:
    """Return the seconds of a bare copy and of torch.save."""
    weights = operator._models[0].state_dict()
    pairs = [(weight.untyped_storage(), torch.empty(weight.nbytes, dtype=torch.uint8)) for weight in weights.values()]

    def copy() -> None:
        for storage, there in pairs:
            ctypes.memmove(there.data_ptr(), storage.data_ptr(), storage.nbytes())

    copy()  # new memory takes longer

    def save() -> None:
        torch.save(weights, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())

    taken = {"copy": _seconds(copy), "save": _seconds(save)}
    path.unlink()
    return taken


def _bare_write(path: Path, content: memoryview, flag: int) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flag)
    for offset in range(0, len(content), BLOCK):
        os.pwrite(file, content[offset : offset + BLOCK], offset)
    os.fsync(file)
    os.close(file)
    path.unlink()


def _seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _stalls(taken: dict[str, list[float]]) -> list[str]:
    return [_ratio(taken, name, "copy") for name in ("train", "busy", "save")]


def _on_disk(taken: dict[str, list[float]], bare: str) -> list[str]:
    durable, notice = _ratio(taken, "durable", bare), _ratio(taken, "notice", "copy", bare)
    return [*_ms(taken, "durable"), durable, *_ms(taken, "notice"), notice]


def _ms(taken: dict[str, list[float]], *names: str) -> list[str]:
    return [f"{1e3 * statistics.median(taken[name]):.0f}" for name in names]


def _ratio(taken: dict[str, list[float]], name: str, *floors: str) -> str:
    rounds = zip(taken[name], *(taken[floor] for floor in floors), strict=True)
    return f"{statistics.median(seconds / sum(bare) for seconds, *bare in rounds):.2f}"


if __name__ == "__main__":
    main()
