"""What rank 0 prints, also on the driver's screen: progress bars, and the words of users' operators."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import TextIO

Send = Callable[[dict[str, str], bytes], None]


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
