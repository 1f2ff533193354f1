"""The folder that TensorBoard shows: reported metrics, a trial's own events through one writer, traces of the profiler.

A checkpoint holds how long each event file was. A resume cuts off what was written after it, whatever its steps count:
that is run again, and written again. TensorBoard's own way, to purge by steps, would hide what counts records, show
twice what counts from 0, and know nothing of what other readers of the files see.
"""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch

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


class Profiler:
    """torch's profiler around the training loop.

    Entered once for the whole loop, so that a schedule of wait, warm-up and active steps counts batches: those of
    this process, from 0. A stop in the middle of the active ones leaves a trace of those that there were; what follows
    the last batch, the save above all, is in it as one step more.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._profile: torch.profiler.profile | None = None
        self.running = False

    def set(self, *arguments: Any, **options: Any) -> None:
        """What torch.profiler.profile takes; `on_trace_ready` is ours. Raises UsageError off cluster."""
        if self._folder is None:
            raise UsageError("set_profiler: there is no folder for traces in a context without a run")
        if options.pop("on_trace_ready", None) is not None:
            warnings.warn("set_profiler: on_trace_ready is not used; traces go to the TensorBoard folder", stacklevel=3)
        self._profile = torch.profiler.profile(*arguments, on_trace_ready=self._keep, **options)

    def start(self) -> None:
        if self._profile:
            self._profile.start()
            self.running = True

    def step(self) -> None:
        """After each batch while it is running."""
        if self._profile:
            self._profile.step()

    def stop(self) -> None:
        if self.running and self._profile:
            self.running = False
            self._profile.stop()

    def _keep(self, profile: torch.profiler.profile) -> None:
        """A trace under the name by which TensorBoard knows it, whole or not at all: a job may end on the way."""
        assert self._folder
        make_folders(self._folder)
        worker, now = f"{socket.gethostname()}_{os.getpid()}", time.time_ns()
        partial = self._folder / f".{worker}.{now}.partial"
        profile.export_chrome_trace(str(partial))
        partial.rename(self._folder / f"{worker}.{now}.pt.trace.json")
