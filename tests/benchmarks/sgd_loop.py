"""Measure what the default train_epoch and train_batch add to a batch: one rank, in turns with a bare loop of its
process.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpc_det.sgd import TrainingOperator
from hpc_det.sgd.rank import RankPlace, RankSettings
from hpc_det.sgd.rank.runner import Runner
from tests.benchmarks.loop_overhead import HEADER, cost_of, row
from tests.benchmarks.sgd_cases import tiny_model
from tests.benchmarks.table import show
from tests.benchmarks.turns import RATE, BareLoop, Batch, Turns, ready_made_batches, weights_of

ROUNDS, PERIODS = 7, 40


class Tiny(TrainingOperator):
    def setup(self, config: dict[str, Any]) -> None:
        model = tiny_model()
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=RATE), criterion=nn.CrossEntropyLoss()
        )
        self.register_data(train_loader=config["batches"])


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        rounds = {
            name: [
                cost_of(loop, BareLoop(cycle(ready_made_batches()), new_model=tiny_model), PERIODS, Path(root))
                for _ in range(ROUNDS)
            ]
            for name, loop in {"the bare loop": _bare, "TrainingOperator": _ours}.items()
        }
    show(
        f"one rank and one tiny layer, {ROUNDS} rounds of {PERIODS} times 100 batches, microseconds a batch",
        HEADER,
        [row(name, costs) for name, costs in rounds.items()],
    )


def _bare(turns: Turns, folder: Path) -> torch.Tensor:
    loop = BareLoop(iter(turns.of(ready_made_batches())), new_model=tiny_model)
    loop.train(turns.batches)
    return loop.weights


def _ours(turns: Turns, folder: Path) -> torch.Tensor:
    runner = Runner(_settings(turns.of(ready_made_batches())), RankPlace(0, 0, 1))
    runner.train()
    return weights_of(runner.models()[0])


def _settings(batches: Iterable[Batch]) -> RankSettings:
    return RankSettings(
        operator_cls=Tiny,
        config={"batches": batches},
        num_workers=1,
        use_gpu=False,
        use_fp16=False,
        use_tqdm=False,
        wrap_ddp=True,
        add_dist_sampler=True,
        scheduler_step_freq=None,
        timeout_s=60.0,
    )


if __name__ == "__main__":
    main()
