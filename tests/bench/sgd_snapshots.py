"""What the snapshot after each train() holds it up for, beside bare copies of the same bytes in the same process."""

from __future__ import annotations

import io
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hpc_det.checkpoint.snapshots import last_number
from hpc_det.sgd import TorchTrainer, TrainingOperator
from hpc_det.store.run_folder import RunFolder
from tests.bench.sgd_cases import Empty, new_trainer
from tests.bench.table import show
from tests.wait import wait_for

MEGABYTES = (100, 500)
ROUNDS, WARM_UP = 7, 3
DURABLE_S = 60.0


def main() -> None:
    rows = [_row(megabytes) for megabytes in MEGABYTES]
    show(
        f"an empty train() of one rank with its snapshot, {ROUNDS} rounds in turns, milliseconds (medians)",
        (
            "weights [MB]",
            "train()",
            "a copy into memory that is there",
            "clone()",
            "torch.save into memory",
            "train() while the one before is written",
            "until it is durable",
        ),
        rows,
    )


def _row(megabytes: int) -> list[str]:
    taken: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(Path(folder) / "run")
        with new_trainer(Empty, 1, run=run.path, config={"megabytes": megabytes}) as trainer:
            for _ in range(WARM_UP + ROUNDS):
                for name, seconds in _round(trainer, run).items():
                    taken.setdefault(name, []).append(seconds)
    values = [statistics.median(times[WARM_UP:]) for times in taken.values()]
    return [str(megabytes), *(f"{1e3 * value:.0f}" for value in values)]


def _round(trainer: TorchTrainer, run: RunFolder) -> dict[str, float]:
    copies = trainer.apply_all_operators(bare_copies)[0]
    _await_durable(trainer, run)
    began = time.perf_counter()
    trainer.train()
    quiet = time.perf_counter()
    trainer.train()
    busy = time.perf_counter()
    _await_durable(trainer, run)
    return {"quiet": quiet - began, **copies, "busy": busy - quiet, "durable": time.perf_counter() - quiet}


def _await_durable(trainer: TorchTrainer, run: RunFolder) -> None:
    """One is kept as soon as the one before is; the next call asks for it."""
    wait_for(lambda: last_number(run) > 0 and not any(run.snapshots.glob(".*.partial")), DURABLE_S)


def bare_copies(operator: TrainingOperator) -> dict[str, float]:
    """Seconds."""
    weights = operator._models[0].state_dict()
    there = {name: weight.clone() for name, weight in weights.items()}

    def copy() -> None:
        for name, weight in weights.items():
            there[name].copy_(weight)

    return {
        "copy": _seconds(copy),
        "clone": _seconds(lambda: [weight.clone() for weight in weights.values()]),
        "save": _seconds(lambda: torch.save(weights, io.BytesIO())),
    }


def _seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
