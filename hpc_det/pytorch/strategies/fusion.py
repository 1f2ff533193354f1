"""Choosing the size of DDP's gradient buckets from measurements of the first batches of a run.

Large buckets have less overhead; small ones are sent while the backward pass continues. The best size depends on the
model, the network and the number of ranks. The size of a batch's buckets decides how its sums are rounded, so all
measurements are part of a checkpoint, and a run that resumes in between uses the same sizes.
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
"""Sizes to try, in MB, around DDP's default of 25. One bucket for everything is tried as the next size above the
model's.
"""
EXCHANGES = 10
"""Exchanges with each size. The first one after a change is not counted."""
_MB = 2**20


class FusionTuner:
    """Tunes the models of a trial that leave the size open. All ranks change it at the same batch."""

    def __init__(self, distributed: Distributed, models: Iterable[torch.nn.Module]) -> None:
        """Set the first size to try. Collective."""
        self._distributed = distributed
        self._models = [model for model in models if isinstance(model, DataParallel) and model.leaves_bucket_size]
        self._sizes = _sizes(max((_gradient_mb(model) for model in self._models), default=0))
        self._seconds: list[list[float]] = [[] for _ in self._sizes]
        """Time of each exchange in seconds, by size, measured from the end of the previous batch."""
        self._exchanges = 0
        self._began = 0.0
        """Time at which the previous batch ended."""
        # With one size there is nothing to choose.
        self.chosen_mb: int | None = self._sizes[0] if len(self._sizes) == 1 else None
        self._lay_out()

    @property
    def is_tuning(self) -> bool:
        return self.chosen_mb is None

    def end_exchange(self) -> None:
        """Record a batch that has exchanged gradients. Collective after the last size."""
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
        """Restore the state of a run with the same models and number of ranks."""
        self._exchanges, self._seconds, self.chosen_mb = state["exchanges"], state["seconds"], state["chosen_mb"]
        self._began = self._now()
        self._lay_out()

    def _choose(self) -> None:
        """Choose the size with the least median time, which a few validations and saves in between do not affect."""
        # rank 0 decides, since ranks measure different times and all need the same size
        medians = [statistics.median(seconds) for seconds in self._seconds]
        self.chosen_mb = self._distributed.broadcast_json(self._sizes[medians.index(min(medians))])
        if self._distributed.is_chief:
            tried = ", ".join(f"{mb} MB {1e3 * s:.1f} ms" for mb, s in zip(self._sizes, medians, strict=True))
            print(f"hpc-det: gradients are exchanged in buckets of {self.chosen_mb} MB; a batch: {tried}", flush=True)

    def _lay_out(self) -> None:
        """Set the chosen bucket size, or the size that is tried next."""
        size = self.chosen_mb or self._sizes[self._exchanges // EXCHANGES]
        for model in self._models:
            model.resize_buckets(size)

    def _now(self) -> float:
        """Return the time after the device has completed its work."""
        if self._distributed.device.type == "cuda":
            torch.cuda.synchronize(self._distributed.device)
        return time.perf_counter()


def _gradient_mb(model: torch.nn.Module) -> float:
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad) / _MB


def _sizes(model_mb: float) -> list[int]:
    """Return the sizes that give different buckets for a model of this size."""
    below = list(takewhile(lambda size: size < model_mb, SIZES_MB))
    return [*below, *SIZES_MB[len(below) : len(below) + 1]]
