"""The size of the buckets in which DDP exchanges gradients, found out by the first batches of a run.

Large buckets cost less in all; small ones are on their way while the backward pass goes on. What is best depends on the
model, the network and the number of ranks. Which size a batch has had decides how its sums are rounded, so all that was
found out is part of a checkpoint, and a run that is resumed, also in between, lays out its batches as it would have.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from itertools import takewhile
from typing import Any

import torch

from hpc_det.distributed.collectives import Distributed
from hpc_det.pytorch.strategies.ddp import DataParallel

SIZES_MB = (1, 5, 25, 100)
"""Around DDP's own 25. One bucket for everything is tried as the next size above the model's."""
EXCHANGES = 10
"""With each size. The first one after a change is not counted."""
_MB = 2**20


class FusionTuner:
    """For the models of a trial that leave the size to it. All ranks change it at the same batch."""

    def __init__(self, distributed: Distributed, models: Iterable[torch.nn.Module]) -> None:
        """Lays out the first size."""
        self._distributed = distributed
        self._models = [model for model in models if isinstance(model, DataParallel) and model.leaves_bucket_size]
        self._sizes = _sizes(max((_gradient_mb(model) for model in self._models), default=0))
        self._seconds: list[list[float]] = [[] for _ in self._sizes]
        """Of the exchanges with each size, from the end of the batch before on."""
        self._exchanges = 0
        self._began = 0.0
        """When the batch before had ended."""
        self.chosen_mb: int | None = self._sizes[0] if len(self._sizes) == 1 else None
        self._lay_out()

    @property
    def is_tuning(self) -> bool:
        return self.chosen_mb is None

    def end_exchange(self) -> None:
        """After each batch that has exchanged gradients, while it is tuning. Collective when all sizes were tried."""
        number, first = divmod(self._exchanges, EXCHANGES)
        if first:
            self._seconds[number].append(self._now() - self._began)
        self._exchanges += 1
        if self._exchanges == EXCHANGES * len(self._sizes):
            self._choose()
        if not self._exchanges % EXCHANGES:
            self._lay_out()
        self._began = self._now()

    def state(self) -> dict[str, Any]:
        return {"exchanges": self._exchanges, "seconds": self._seconds, "chosen_mb": self.chosen_mb}

    def restore(self, state: dict[str, Any]) -> None:
        """Of a run with the same models and number of ranks."""
        self._exchanges, self._seconds, self.chosen_mb = state["exchanges"], state["seconds"], state["chosen_mb"]
        self._began = self._now()
        self._lay_out()

    def _choose(self) -> None:
        """By the median, which validations and saves in between do not move."""
        medians = [statistics.median(seconds) for seconds in self._seconds]
        self.chosen_mb = self._distributed.broadcast_json(self._sizes[medians.index(min(medians))])
        if self._distributed.is_chief:
            tried = ", ".join(f"{mb} MB {1e3 * s:.1f} ms" for mb, s in zip(self._sizes, medians, strict=True))
            print(f"hpc-det: gradients are exchanged in buckets of {self.chosen_mb} MB; a batch: {tried}", flush=True)

    def _lay_out(self) -> None:
        size = self.chosen_mb or self._sizes[self._exchanges // EXCHANGES]
        for model in self._models:
            model.resize_buckets(size)

    def _now(self) -> float:
        """When the device has done what it was given."""
        if self._distributed.device.type == "cuda":
            torch.cuda.synchronize(self._distributed.device)
        return time.perf_counter()


def _gradient_mb(model: torch.nn.Module) -> float:
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad) / _MB


def _sizes(model_mb: float) -> list[int]:
    """Those that lay out a model of this size differently."""
    below = list(takewhile(lambda size: size < model_mb, SIZES_MB))
    return [*below, *SIZES_MB[len(below) : len(below) + 1]]
