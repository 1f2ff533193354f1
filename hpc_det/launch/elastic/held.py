"""The snapshots that a node holds: anonymous memory, which outlives the ranks that write to it and nothing else."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from hpc_det.checkpoint.snapshots import begin, split
from hpc_det.errors import HpcDetError
from hpc_det.launch.elastic.frames import Message
from hpc_det.store.run_folder import RunFolder
from hpc_det.store.sealed_file import copy_sealed

BUFFERS = 3
"""The newest whole snapshot, one on its way to the disk, and one that is being written."""


def memory() -> list[int]:
    """File descriptors (memfd_create(2)): no name, so nothing to clean up; the job's memory, like the ranks' own."""
    return [os.memfd_create(f"snapshot-{number}") for number in range(BUFFERS)]


@dataclass(frozen=True)
class Held:
    """One that is whole."""

    number: int
    buffer: int
    """The file descriptor of what all ranks share."""
    progress: dict[str, int]
    """"epochs_done" and "calls"."""
    own: list[bytes]
    """Of each rank, on the node that writes; opaque here."""

    @classmethod
    def of(cls, order: Message, buffers: list[int]) -> Held:
        """What the driver says once all ranks have answered."""
        head, body = order
        return cls(head["number"], buffers[head["buffer"]], head["progress"], split(body, head["own"]))


def keep(held: Held, run: RunFolder) -> dict[str, Any]:
    """Make it durable; what the driver is to hear of it."""
    try:
        partial = begin(run, held.number)
        partial.commit(copy_sealed(held.buffer, partial.state, run.key()), held.own, **held.progress)
    except OSError as error:
        return {"kept": held.number, "error": f"{error.filename or run.snapshots}: {error.strerror}"}
    except HpcDetError as error:  # the key is gone, or no secret any more
        return {"kept": held.number, "error": str(error)}
    return {"kept": held.number}
