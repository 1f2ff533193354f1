"""The content of a trial's checkpoints: what its strategy saves, its callbacks see, and its code's files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc_det.checkpoint.checkpoints import Put
from hpc_det.checkpoint.seals import FileEntry
from hpc_det.core.portable import Portable
from hpc_det.distributed.metrics import MetricWindow
from hpc_det.pytorch.strategies.strategy import Strategy
from hpc_det.pytorch.trial.callback import Callbacks


class TrialContent:
    """The content of one rank's part of the checkpoints (see hpc_det.core.saver.Content)."""

    def __init__(self, strategy: Strategy, portable: Portable, callbacks: Callbacks, window: MetricWindow) -> None:
        """`window` belongs to the loop and changes as it trains."""
        self._strategy = strategy
        self._portable = portable
        self._callbacks = callbacks
        self._window = window
        self.writes = strategy.saves_on_every_rank
        self.sees_files = callbacks.overrides("on_checkpoint_write_end")

    def expected(self) -> list[Any]:
        return self._strategy.expected(self._callbacks, self._window)

    def files(self) -> dict[str, Any]:
        return self._strategy.files(self._callbacks, self._window)

    def write(self, folder: Path, put: Put) -> None:
        self._strategy.write(folder, put)
        self._callbacks.call("on_checkpoint_write_end", str(folder))

    def finish(self, folder: Path, steps: int) -> Mapping[str, FileEntry]:
        entries = self._portable.write(folder, steps)
        if not self.writes:
            self._callbacks.call("on_checkpoint_write_end", str(folder))
        return entries

    def committed(self, uuid: str) -> None:
        self._callbacks.call("on_checkpoint_upload_end", uuid)
