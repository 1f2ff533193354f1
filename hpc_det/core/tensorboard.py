"""The TensorBoard folder of a rank: reported metrics, the trial's own events, and traces of torch's profiler.

A checkpoint contains the length of each event file. A resume truncates the files to these lengths, since the training
after the checkpoint is repeated and writes its events again. TensorBoard's own mechanism, `purge_step`, is not used: it
hides events by their step, which is wrong for steps that count records or start at 0 again, and other readers of the
files ignore it.
"""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch

from hpc_det.distributed.metrics import scalar
from hpc_det.errors import UsageError, pip_install
from hpc_det.node.files import make_folders

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_OURS = ".hpc_det"
"""Suffix of the event files of this module's writer. Files of other writers in the folder are never truncated."""
_QUEUE = 10_000
"""Events that may wait for the writer's thread. With torch's 10, many events at once wait for it one by one."""


class TensorBoard:
    """The event files of one rank.

    The package tensorboard is imported, and its writer's thread started, at the first event. If the package is not
    installed, `report` writes nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        """Store the folder.

        None if the context was made without a run (`from_config`): what the trial itself writes goes to a temporary
        folder, and `report` writes nothing.
        """
        self._folder = folder
        self._temporary: Path | None = None
        self._writer: SummaryWriter | None = None
        self._suffix = f".{uuid4().hex}{_OURS}"
        """Suffix of the event files of this process, which `cut` does not truncate."""
        self.enabled = True
        """Whether `report` writes events."""

    @property
    def folder(self) -> Path:
        """The folder of the event files. Without a run, a temporary one, which a note on stderr names."""
        if self._folder:
            return self._folder
        if self._temporary is None:
            self._temporary = Path(mkdtemp(prefix="hpc_det-tensorboard-"))
            atexit.register(shutil.rmtree, self._temporary, ignore_errors=True)
            _note(
                f"a trial without a run has no TensorBoard folder; it writes to {self._temporary}, which is "
                f"deleted when this process exits"
            )
        return self._temporary

    @property
    def writer(self) -> SummaryWriter:
        """The writer of this process. Raises UsageError without the package tensorboard."""
        if (writer := self._opened()) is None:
            raise UsageError(
                f"get_tensorboard_writer: the package tensorboard is not installed; run {pip_install('tensorboard')}"
            )
        return writer

    def position(self) -> dict[str, int]:
        """Return the lengths, in bytes, of the event files of this process and of earlier ones, by file name."""
        self.flush()
        return {file.name: file.stat().st_size for file in self._files()}

    def cut(self, position: Mapping[str, int]) -> None:
        """Truncate the event files of earlier processes to the lengths in `position`; to 0 if a file is not in it.

        The file of this process is kept as it is: a trial may write events before its state is restored.
        """
        for file in self._files():
            length = position.get(file.name, 0)
            if not file.name.endswith(self._suffix) and file.stat().st_size > length:
                os.truncate(file, length)

    def report(self, kind: str, steps: int, metrics: Mapping[str, Any]) -> None:
        """Write an event for each scalar in `metrics`. `kind` is "training" or "validation", `steps` the batch.

        Names are Determined's: "Determined/" before each, and "val_" before those of a validation that do not start
        with "val".
        """
        writer = self._opened() if self.enabled and self._folder else None
        if writer is None:
            return
        for name, value in metrics.items():
            if (number := scalar(value)) is not None:
                validation = kind == "validation" and not name.startswith("val")
                writer.add_scalar(f"Determined/{'val_' if validation else ''}{name}", number, steps)

    def flush(self) -> None:
        """Write buffered events to the file."""
        if self._writer:
            self._writer.flush()

    def close(self) -> None:
        """Write all events and end the writer's thread."""
        if self._writer:
            self._writer.close()

    def _opened(self) -> SummaryWriter | None:
        """Return the writer, created at the first call; None if the package tensorboard is not installed."""
        if self._writer is None:
            try:
                # Imported here: the package is optional, and its import takes time.
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                return None
            make_folders(self.folder)
            self._writer = SummaryWriter(str(self.folder), max_queue=_QUEUE, filename_suffix=self._suffix)
        return self._writer

    def _files(self) -> Iterator[Path]:
        """Return the event files of this process and of earlier ones."""
        return self._folder.glob(f"*{_OURS}") if self._folder else iter(())


class Profiler:
    """A torch profiler around the training loop.

    The profiler is started once for the whole loop, so a schedule of wait, warm-up and active steps counts the batches
    of this process from 0. If training stops during the active steps, the trace contains the steps so far; the work
    after the last batch, mainly the save, appears as one more step.
    """

    def __init__(self, folder: Path | None) -> None:
        """Store the folder of the traces; None if the context was made without a run."""
        self._folder = folder
        self._profile: torch.profiler.profile | None = None
        self.running = False
        """Whether the profiler is started and not yet stopped."""

    def set(self, *arguments: Any, **options: Any) -> None:
        """Create the profiler with arguments of torch.profiler.profile, of which `on_trace_ready` is ignored.

        Without a run, there is no training loop to profile: a note on stderr says that the profiler is not used.
        """
        if options.pop("on_trace_ready", None) is not None:
            warnings.warn(
                "set_profiler: on_trace_ready is ignored; traces are written to the TensorBoard folder", stacklevel=3
            )
        profile = torch.profiler.profile(*arguments, on_trace_ready=self._keep, **options)
        if self._folder is None:
            _note("set_profiler has no effect without a run: no training loop of hpc_det runs the profiler")
            return
        self._profile = profile

    def start(self) -> None:
        """Start the profiler, if one is set."""
        if self._profile:
            self._profile.start()
            self.running = True

    def step(self) -> None:
        """Mark the end of a batch. Call it while the profiler is running."""
        if self._profile:
            self._profile.step()

    def stop(self) -> None:
        """Stop the profiler, which writes the trace of unfinished active steps. May be called again."""
        if self.running and self._profile:
            self.running = False
            self._profile.stop()

    def _keep(self, profile: torch.profiler.profile) -> None:
        """Write a trace under a file name that TensorBoard recognizes."""
        assert self._folder
        make_folders(self._folder)
        worker, now = f"{socket.gethostname()}_{os.getpid()}", time.time_ns()
        # Renamed when complete: the job may end during the export, and a partial trace cannot be read.
        partial = self._folder / f".{worker}.{now}.partial"
        profile.export_chrome_trace(str(partial))
        partial.rename(self._folder / f"{worker}.{now}.pt.trace.json")


def _note(text: str) -> None:
    print(f"hpc-det: note: {text}", file=sys.stderr)
