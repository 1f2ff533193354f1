"""How a rank hears that it should stop: from its agent, or by a signal of its own."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable

from hpc_det.node.lines import Line
from hpc_det.node.process import SignalPipe


class Listener:
    """A thread that waits for either, and gives notice (hpc_det.distributed.preempt)."""

    def __init__(self, signals: SignalPipe, line: Line | None, give_notice: Callable[[float | None], None]) -> None:
        """`give_notice` takes the deadline, where it is known."""
        self._signals = signals
        self._line = line
        self._give_notice = give_notice
        self._end, self._end_by = os.pipe()
        self._thread = threading.Thread(target=self._listen, name="stop-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hear nothing any more."""
        os.write(self._end_by, b"end")
        self._thread.join()
        os.close(self._end)
        os.close(self._end_by)

    def _listen(self) -> None:
        sources: list[int] = [self._end, self._signals.fd, *([self._line.connection.fileno()] if self._line else [])]
        while True:
            ready = select.select(sources, [], [])[0]
            if self._end in ready:
                return
            if self._signals.fd in ready:
                self._on_signals(self._signals.received())
            if self._line and self._line.connection.fileno() in ready:
                self._on_line(self._line)

    def _on_signals(self, received: list[signal.Signals]) -> None:
        """The agent tells all ranks to stop; without one the gang was started by hand, and this rank speaks for it."""
        for number in received:
            if self._line:
                self._line.send({"signal": number.name})
            else:
                self._give_notice(None)

    def _on_line(self, line: Line) -> None:
        messages = line.receive_some()
        if messages is None:
            print("hpc-det: the node agent is gone; this rank leaves", file=sys.stderr, flush=True)
            os._exit(1)
        for message in messages:
            if "stop" in message.head:
                self._give_notice(message.head.get("deadline"))
