"""use_tqdm: a bar over the batches of a call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from typing import Any

from hpc_det.distributed.metrics import plain
from hpc_det.sgd.operator.constants import EPOCH_IDX, NUM_STEPS


def bar_over(batches: Iterable[Any], info: Mapping[str, Any]) -> Bar:
    """Titled "2/10e" for the second of `num_epochs` 10 in `info`, else "2e"; as long as is known."""
    of_all = f"/{info['num_epochs']}" if "num_epochs" in info else ""
    total = info[NUM_STEPS]
    if total is None and isinstance(batches, Sized):
        total = len(batches)
    return Bar(f"{info[EPOCH_IDX] + 1}{of_all}e", total)


class NoBar:
    def __enter__(self) -> NoBar:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def advance(self, metrics: Mapping[str, Any]) -> None:
        """One batch is done."""


class Bar(NoBar):
    """With the metrics of the last batch, which are read, and waited for, only when the bar is drawn."""

    def __init__(self, title: str, batches: int | None) -> None:
        from tqdm import tqdm

        self._bar = tqdm(desc=title, total=batches, unit="batch", leave=False)

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def advance(self, metrics: Mapping[str, Any]) -> None:
        if self._bar.update():
            self._bar.set_postfix({name: plain(value) for name, value in metrics.items()})
