"""torch's profiler around the training loop."""

from __future__ import annotations

import os
import socket
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from hpc_det.errors import UsageError
from hpc_det.node.files import make_folders


class Profiler:
    """Entered once for the whole loop, so that a schedule of wait, warm-up and active steps counts batches: those of
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
