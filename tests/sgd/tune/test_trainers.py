"""Searches whose trials are TorchTrainers, with real ranks on this machine."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hpc_det.node.json_files import read_lines
from hpc_det.node.process import children, descendants
from hpc_det.sgd import TorchTrainer
from hpc_det.sgd.tune import grid_search, loguniform, pbt, tune_run
from tests.sgd.trained import Linear

pytestmark = pytest.mark.long


@contextmanager
def random_kills(run: Path, seed: int) -> Iterator[list[int]]:
    """Kill a random process of a trial after every second iteration of any trial: the trial's process, an agent or a
    rank.
    """
    killed: list[int] = []
    draws, is_over = random.Random(seed), threading.Event()
    others = children(os.getpid())  # children of this process that belong to no trial

    def iterations() -> int:
        return sum(len(read_lines(path)) for path in run.glob("trials/*/metrics.jsonl"))

    def kill() -> None:
        begin = 0
        while not is_over.wait(draws.uniform(0, 0.4)):
            if iterations() < begin + 2:
                continue
            begin = iterations()
            own = [child for child in children(os.getpid()) if child not in others]
            trials = [pid for child in own for pid in (child, *descendants(child))]
            if trials:
                killed.append(draws.choice(trials))
                try:
                    os.kill(killed[-1], signal.SIGKILL)
                except ProcessLookupError:
                    killed.pop()

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        is_over.set()
        thread.join()


def test_a_grid_of_trainers_finds_the_better_rate(tmp_path: Path) -> None:
    trainable = TorchTrainer.as_trainable(training_operator_cls=Linear, num_workers=2, executor="local")
    analysis = tune_run(
        trainable,
        config={"lr": grid_search([0.0001, 0.05])},
        stop={"training_iteration": 2},
        metric="val_loss",
        max_concurrent=2,
        run=tmp_path / "run",
    )
    assert analysis.get_best_config(metric="val_loss", mode="min") == {"lr": 0.05}
    assert {row["epoch"] for row in analysis.rows()} == {2.0}
    assert not list((tmp_path / "run").rglob("trainer-*"))
    with TorchTrainer(training_operator_cls=Linear, executor="local") as trainer:
        trainer.load(str(analysis.best_checkpoint))
        assert trainer.validate()["val_loss"] == pytest.approx(analysis.best_result["val_loss"], rel=1e-4)  # type: ignore[index]


def train_for_a_while(trainer: TorchTrainer, info: dict[str, Any]) -> dict[str, Any]:
    """Train for long enough that a kill interrupts something."""
    time.sleep(0.15)
    return {**trainer.train(max_retries=0), **trainer.validate()}


def test_a_population_of_trainers_outlives_random_kills(tmp_path: Path) -> None:
    trainable = TorchTrainer.as_trainable(
        training_operator_cls=Linear, num_workers=2, executor="local", override_tune_step=train_for_a_while
    )
    with random_kills(tmp_path / "run", seed=3) as killed:
        analysis = tune_run(
            trainable,
            config={"lr": loguniform(1e-4, 1e-1)},
            stop={"training_iteration": 12},
            metric="val_loss",
            num_samples=3,
            searcher=pbt(interval=4, quantile=0.34),
            max_concurrent=2,
            max_failures=100,
            run=tmp_path / "run",
            seed=1,
        )
    assert killed
    assert [trial.status for trial in analysis.trials] == ["completed"] * 3
    iterations = [[result["training_iteration"] for result in trial.results] for trial in analysis.trials]
    assert iterations == [list(range(1, 13))] * 3
    assert analysis.best_result
    assert analysis.best_result["val_loss"] < 1
