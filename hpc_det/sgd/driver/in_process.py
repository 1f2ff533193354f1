"""The driver's own process as a node of one slot (use_local): its rank is where a debugger is."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from hpc_det.node.frames import Message
from hpc_det.node.key import derived
from hpc_det.sgd.elastic.held import BUFFERS, Buffer, Held, keep
from hpc_det.sgd.rank.worker import Worker
from hpc_det.store.run_folder import RunFolder


class InProcess:
    """Stands for the line to an agent: what the driver sends is done at once, by this process.

    `answer` is called with what an agent would say.
    """

    def __init__(self, run: RunFolder, address: tuple[str, int], answer: Callable[[dict[str, Any]], None]) -> None:
        self.worker: Worker | None = None
        self._run = run
        self._address = address
        self._answer = answer
        self._buffers = [Buffer(number) for number in range(BUFFERS)]
        self._former: dist.ProcessGroup | None = None
        """Of the gang that has ended. What destroys a group has the GIL and waits for gloo's threads, and one of those
        may wait for the GIL, to drop what a lost peer has broken off. Until there is another gang, they have done that.
        """

    @property
    def heard_at(self) -> float:
        return time.monotonic()

    def send(self, head: dict[str, Any], body: bytes = b"") -> None:
        getattr(self, f"_{head['do']}")(head, body)

    def serve(self) -> None:
        """What the driver has just asked of all ranks, by the thread that asks."""
        if self.worker:
            self.worker.serve_one()

    def close(self) -> None:
        for buffer in self._buffers:
            os.close(buffer.descriptor)
        self._buffers = []

    def _fork(self, head: dict[str, Any], body: bytes) -> None:
        key = derived(self._run.key(), f"generation {head['generation']}")
        self._former = None
        place = {"rank": 0, "local_rank": 0, "size": head["size"], "generation": head["generation"]}
        buffers = [buffer.descriptor for buffer in self._buffers]
        self.worker = Worker({**place, "driver": self._address, "key": key.hex(), "buffers": buffers})

    def _end(self, head: dict[str, Any], body: bytes) -> None:
        if self.worker:
            self._former = dist.group.WORLD
            self.worker.close()
            self.worker = None
        self._answer({"ended": head["generation"]})

    def _hold(self, head: dict[str, Any], body: bytes) -> None:
        """Written at once where it is to be durable: here nothing is behind the training."""
        if head["keep"]:
            self._answer(keep(Held.of(Message(head, body), self._buffers), self._run))

    def _leave(self, head: dict[str, Any], body: bytes) -> None:
        self.close()
