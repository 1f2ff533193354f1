"""The snapshots that a node holds: anonymous memory, which outlives the ranks that write to it and nothing else."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hpc_det.checkpoint.sealed_files import SaveAbandoned
from hpc_det.checkpoint.snapshots import begin, last_number, split
from hpc_det.errors import HpcDetError
from hpc_det.node.frames import Message
from hpc_det.store.run_folder import RunFolder

BUFFERS = 3
"""The newest whole snapshot, one on its way to the disk, and one that is being written."""


class Buffer:
    """Memory without a name (memfd_create(2)): nothing to clean up; the job's, like the ranks' own."""

    def __init__(self, number: int) -> None:
        self.descriptor = os.memfd_create(f"snapshot-{number}")
        self._mapped: mmap.mmap | None = None
        """Kept as long as it is large enough: the kernel looks each page up once."""

    def content(self) -> memoryview:
        """What ranks have written; there is some."""
        size = os.fstat(self.descriptor).st_size
        if self._mapped is None or len(self._mapped) < size:
            self._mapped = mmap.mmap(self.descriptor, size, prot=mmap.PROT_READ)
        return memoryview(self._mapped)[:size]


@dataclass(frozen=True)
class Held:
    """One that is whole."""

    number: int
    buffer: Buffer
    """What all ranks share."""
    progress: dict[str, Any]
    """"epochs_done", "calls" and "round"."""
    own: list[bytes]
    """Of each rank, on the node that writes; opaque here."""

    @classmethod
    def of(cls, order: Message, buffers: list[Buffer]) -> Held:
        """What the driver says once all ranks have answered."""
        head, body = order
        return cls(head["number"], buffers[head["buffer"]], head["progress"], split(body, head["own"]))


class Keeper:
    """Makes snapshots durable, one at a time, in a thread. What is older is given up for what is newer."""

    def __init__(self, run: RunFolder, tell: Callable[[dict[str, Any]], None]) -> None:
        """`tell` is called by another thread with what the driver is to hear."""
        self._run = run
        self._tell = tell
        self._newest: Held | None = None
        self._thread: threading.Thread | None = None

    def begin(self, held: Held) -> None:
        self._newest = held
        self._thread = threading.Thread(target=self._keep, args=(held, self._thread), name="writer")
        self._thread.start()

    def settle(self, held: Held | None) -> None:
        """The driver is gone, and whoever goes on for it shall lose no call that had returned: `held` is the newest."""
        self._newest = held or self._newest
        if self._thread:
            self._thread.join()
        if held and held.number > last_number(self._run):
            keep(held, self._run)

    def _keep(self, held: Held, former: threading.Thread | None) -> None:
        if former:
            former.join()
        with suppress(SaveAbandoned):
            self._tell(keep(held, self._run, lambda: self._newest is not held))


def keep(held: Held, run: RunFolder, is_superseded: Callable[[], bool] = lambda: False) -> dict[str, Any]:
    """Make it durable; returns what the driver is sent about it. Raises SaveAbandoned if it was superseded."""

    def go_on() -> None:
        if is_superseded():
            raise SaveAbandoned

    try:
        partial = begin(run, held.number)
        partial.commit(partial.write(held.buffer.content(), go_on), held.own, **held.progress)
    except OSError as error:
        return {"kept": held.number, "error": f"{error.filename or run.snapshots}: {error.strerror}"}
    except HpcDetError as error:  # the key is gone, or no secret any more
        return {"kept": held.number, "error": str(error)}
    return {"kept": held.number}
