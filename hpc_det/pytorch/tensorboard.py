"""The reported metrics as TensorBoard shows them, and the one writer that a trial may add its own events to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_det.core.metrics import scalar
from hpc_det.errors import UsageError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    """Nothing is imported, written or started before the first event. Without tensorboard reports are left out."""

    def __init__(self, folder: Path | None) -> None:
        """`folder` None: off cluster."""
        self._folder = folder
        self._purge_step: int | None = None
        self._writer: SummaryWriter | None = None
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

    def begin_at(self, steps: int) -> None:
        """Hide what a lost stretch beyond `steps` batches had written: it is run again."""
        self._purge_step = steps + 1
        if self._writer:
            self._writer.close()  # its next event opens a new file, which begins with the step
            self._writer.purge_step = self._purge_step

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
            self._writer = SummaryWriter(str(self.folder), purge_step=self._purge_step)
        return self._writer
