"""A rank's process, as the fork server starts it: which signals it takes, how it ends, and what it prints."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch.distributed as dist

from hpc_det.distributed.rank_process import leave, log_to
from hpc_det.node.network import variables
from hpc_det.node.process import STOP_SIGNALS
from hpc_det.sgd.rank.worker import RankWorker

Send = Callable[[dict[str, str], bytes], None]


def run(order: dict[str, Any]) -> int:
    """Its exit code."""
    log_to(Path(order["log"]))
    _ignore_stops()
    os.environ.update(_variables(order))
    worker = RankWorker(order, on_end=lambda: leave(1))
    if order["rank"] == 0:
        show_too(worker.line.send)
    worker.serve()
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def _ignore_stops() -> None:
    """They are the agent's business; a DataLoader's worker has the defaults again."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, frame: None)
    os.register_at_fork(after_in_child=_hear_stops)


def _hear_stops() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def _variables(order: dict[str, Any]) -> dict[str, str]:
    """torchrun's, for libraries that ask who they are; and which interface gloo and NCCL shall take."""
    numbers = {"RANK": order["rank"], "WORLD_SIZE": order["size"], "LOCAL_RANK": order["local_rank"]}
    return {name: str(number) for name, number in numbers.items()} | (
        variables(order["interface"]) if order["interface"] else {}
    )


# --- what rank 0 prints, also on the driver's screen: progress bars, and the output of users' operators


def show_too(send: Send) -> None:
    """From now on all that this process writes by Python's streams is also sent."""
    sys.stdout = _Shown(sys.stdout, "stdout", send)
    sys.stderr = _Shown(sys.stderr, "stderr", send)


def show(stream: str, text: bytes | bytearray) -> None:
    """The driver's part. Its terminal may know fewer signs."""
    file = sys.stdout if stream == "stdout" else sys.stderr
    encoding = file.encoding or "utf-8"
    file.write(text.decode().encode(encoding, "replace").decode(encoding))
    file.flush()


class _Shown(io.TextIOBase):
    def __init__(self, log: TextIO, stream: str, send: Send) -> None:
        self._log = log
        self._stream = stream
        self._send = send
        self._pid = os.getpid()

    def write(self, text: str) -> int:
        if os.getpid() == self._pid:  # not in a forked child, a DataLoader's worker: the line is this process's
            self._send({"shown": self._stream}, text.encode(errors="replace"))
        return self._log.write(text)

    def flush(self) -> None:
        self._log.flush()

    def fileno(self) -> int:
        return self._log.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]  # progress bars ask which signs they may draw
        return self._log.encoding
