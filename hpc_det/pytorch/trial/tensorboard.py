"""The reported metrics as TensorBoard shows them, and the one writer that a trial may add its own events to.

A checkpoint holds how long each event file was. A resume cuts off what was written after it, whatever its steps count:
that is run again, and written again. TensorBoard's own way, to purge by steps, would hide what counts records, show
twice what counts from 0, and know nothing of what other readers of the files see.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from hpc_det.distributed.metrics import scalar
from hpc_det.errors import UsageError
from hpc_det.node.files import make_folders

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


_OURS = ".hpc_det"
"""What the names of the writer's files end with; a trial may have others write here, too, which nobody cuts."""


class TensorBoard:
    """Nothing is imported, written or started before the first event. Without tensorboard reports are left out."""

    def __init__(self, folder: Path | None) -> None:
        """`folder` None: off cluster."""
        self._folder = folder
        self._writer: SummaryWriter | None = None
        self._suffix = f".{uuid4().hex}{_OURS}"
        """Of the files that this process writes."""
        self.enabled = True
        """Whether `report` writes."""

    @property
    def folder(self) -> Path:
        """Raises UsageError off cluster."""
        if self._folder is None:
            raise UsageError("get_tensorboard_path: there is none off cluster, since no run has a folder for it")
        return self._folder

    @property
    def writer(self) -> SummaryWriter:
        """Raises UsageError without tensorboard, or off cluster."""
        if (writer := self._opened()) is None:
            raise UsageError(
                "get_tensorboard_writer: the package tensorboard is not installed; "
                "run python3 -m pip install tensorboard"
            )
        return writer

    def position(self) -> dict[str, int]:
        """The length [bytes] of each event file of the writer, of this process and earlier ones, by name."""
        self.flush()
        return {file.name: file.stat().st_size for file in self._files()}

    def cut(self, position: Mapping[str, int]) -> None:
        """Off the files of earlier processes, what was written after that; all of it, where it names no such file.

        What this process has written stays: a trial may do so before it is resumed.
        """
        for file in self._files():
            length = position.get(file.name, 0)
            if not file.name.endswith(self._suffix) and file.stat().st_size > length:
                os.truncate(file, length)

    def report(self, kind: str, steps: int, metrics: Mapping[str, Any]) -> None:
        """The scalars among `metrics`, named as upstream does. `kind`: training or validation."""
        writer = self._opened() if self.enabled and self._folder else None
        if writer is None:
            return
        for name, value in metrics.items():
            if (number := scalar(value)) is not None:
                validation = kind == "validation" and not name.startswith("val")
                writer.add_scalar(f"Determined/{'val_' if validation else ''}{name}", number, steps)

    def flush(self) -> None:
        if self._writer:
            self._writer.flush()

    def close(self) -> None:
        """Everything is on disk, and the writer's thread has ended."""
        if self._writer:
            self._writer.close()

    def _opened(self) -> SummaryWriter | None:
        """None without tensorboard."""
        if self._writer is None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                return None
            make_folders(self.folder)
            self._writer = SummaryWriter(str(self.folder), filename_suffix=self._suffix)
        return self._writer

    def _files(self) -> Iterator[Path]:
        return self._folder.glob(f"*{_OURS}") if self._folder else iter(())
