"""Measure the effect of each of `optimizations` on a batch of two ranks with a slow network.

The network is the loopback of a separate namespace, limited to a gigabit per second, if root may create one; otherwise
it is the machine's own loopback, with hardly any cost. All models exist at once and train in turns.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from itertools import repeat
from time import perf_counter
from typing import Any

import torch
from torch import nn

from hpc_det.distributed.collectives import Distributed
from hpc_det.pytorch import PyTorchTrialContext
from tests.benchmarks.table import show
from tests.distributed.ranks import run_on_ranks

RANKS, ROUNDS, TURN = 2, 5, 4
LAYERS, WIDTH, RECORDS = 32, 512, 32
DEADLINE_S = 3600
SHAPED = "HPC_DET_BENCH_SHAPED"
"""Set in a namespace whose network is slow."""
SLOW = "ip link set lo up && tc qdisc add dev lo root tbf rate 1gbit burst 256kb latency 50ms"

CASES: dict[str, dict[str, Any]] = {
    "none": {},
    "none, beside it": {},
    "`aggregation_frequency: 4`": {"aggregation_frequency": 4},
    "`gradient_compression: true`": {"gradient_compression": True},
    "`tensor_fusion_threshold: 0`": {"tensor_fusion_threshold": 0},
    "`tensor_fusion_threshold: 5`": {"tensor_fusion_threshold": 5},
    "`tensor_fusion_threshold: 100`": {"tensor_fusion_threshold": 100},
    "`auto_tune_tensor_fusion: true`": {"auto_tune_tensor_fusion": True},
    "`mixed_precision: O1`": {"mixed_precision": "O1"},
}


def main() -> None:
    if SHAPED not in os.environ and _may_shape():
        command = f"{SLOW} && exec {sys.executable} -m tests.benchmarks.optimizations"
        subprocess.run(["unshare", "-n", "sh", "-c", command], env={**os.environ, SHAPED: "1"}, check=True)
        return
    (taken, chosen), _ = run_on_ranks(RANKS, seconds_on_a_rank, deadline_s=DEADLINE_S)
    plain = statistics.median(taken["none"])
    network = "a gigabit a second" if SHAPED in os.environ else "the machine's own loopback"
    megabytes = 4 * sum(p.numel() for p in _new_model().parameters()) / 2**20
    show(
        f"{RANKS} ranks, {megabytes:.0f} MB of gradients over {network}, medians of {ROUNDS} turns of {TURN} batches; "
        f"auto-tuned to buckets of {chosen} MB",
        ("optimizations", "ms a batch", "beside none"),
        [
            (name, f"{1e3 * statistics.median(seconds):.0f}", f"{statistics.median(seconds) / plain:.2f}")
            for name, seconds in taken.items()
        ],
    )


def seconds_on_a_rank(distributed: Distributed) -> tuple[dict[str, list[float]], int | None]:
    """Return the seconds of a batch, turn by turn; and the size of buckets that tuning has chosen."""
    trained = {name: Trained(distributed, optimizations) for name, optimizations in CASES.items()}
    fusion = trained["`auto_tune_tensor_fusion: true`"].context.fusion
    assert fusion
    for each in trained.values():
        each.train(TURN)
    while fusion.is_tuning:
        trained["`auto_tune_tensor_fusion: true`"].train(1)
    taken: dict[str, list[float]] = {name: [] for name in trained}
    for _ in repeat(None, ROUNDS):
        for name, each in trained.items():
            distributed.barrier()
            began = perf_counter()
            each.train(TURN)
            taken[name].append((perf_counter() - began) / TURN)
    return taken, fusion.chosen_mb


class Trained:
    """A model in a loop that does only what a training loop must."""

    def __init__(self, distributed: Distributed, optimizations: dict[str, Any]) -> None:
        spec = {"experiment_id": 1, "trial_id": 1, "trial_seed": 1, "hparams": {}}
        self.context = PyTorchTrialContext({**spec, "config": {"optimizations": optimizations}}, distributed)
        self._model = self.context.wrap_model(_new_model())
        self._optimizer = self.context.wrap_optimizer(torch.optim.SGD(self._model.parameters(), lr=1e-3))
        self._inputs = torch.randn(RECORDS, WIDTH)
        self._number = 0
        self.context.begin_fusion()

    def train(self, batches: int) -> None:
        context = self.context
        for _ in repeat(None, batches):
            self._number += 1
            if self._number % context.aggregation_frequency:
                with context.keeping_gradients():
                    self._one_batch()
                continue
            self._one_batch()
            if context.fusion and context.fusion.is_tuning:
                context.fusion.end_exchange()

    def _one_batch(self) -> None:
        self.context.backward(self._model(self._inputs).square().mean())
        self.context.step_optimizer(self._optimizer)


def _new_model() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))


def _may_shape() -> bool:
    """Return whether the network can be limited: this needs root, and the kernel's token bucket filter."""
    try:
        return not subprocess.run(["unshare", "-n", "sh", "-c", SLOW], capture_output=True, check=False).returncode
    except FileNotFoundError:
        return False


if __name__ == "__main__":
    main()
