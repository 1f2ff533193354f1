"""How an app that knows nothing of stops is stopped: its main thread is made to call checkpoint(), and to leave then.

The app has no loop of ours that could ask, so its main thread is interrupted between two of its instructions, by a
signal that nobody else here uses; a call into C or a collective is not. In a gang each rank is interrupted on its own.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from hpc_det.launch.rank import RankProcess, leave

INTERRUPT = signal.SIGURG
"""Ignored by default, so that it harms nobody where an app takes our handler away."""


class Stops:
    """From now on the rank leaves when it is told to stop; `on_stop`, in the main thread, is its last act."""

    def __init__(self, process: RankProcess, on_stop: Callable[[bool], None]) -> None:
        self._process = process
        self._on_stop = on_stop
        self._checkpoint: Callable[[], object] | None = None
        self._told = threading.Event()
        self._is_over = False
        signal.signal(INTERRUPT, self._in_main_thread)
        threading.Thread(target=self._listen, name="stops", daemon=True).start()

    def call(self, checkpoint: Callable[[], object] | None) -> None:
        """The app's function is known now; without one the rank just leaves."""
        self._checkpoint = checkpoint

    def end(self, wait_s: float = 0.0) -> None:
        """The app has ended: stops have no meaning any more. One that comes within `wait_s` is still obeyed."""
        self._told.wait(wait_s)
        self._is_over = True

    def _listen(self) -> None:
        line, signals = self._process.line, self._process.signals
        while True:
            ready = select.select([line.connection.fileno(), signals.fd], [], [])[0]
            if signals.fd in ready:
                for number in signals.received():  # the agent rings for all ranks
                    line.send({"heard": number.name})
            if line.connection.fileno() not in ready:
                continue
            messages = line.receive()
            if messages is None:
                print("hpc-det: the node agent is gone; this rank leaves", file=sys.stderr, flush=True)
                os._exit(1)
            if any("stop" in message for message in messages):
                self._interrupt()
                return

    def _interrupt(self) -> None:
        self._told.set()
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, INTERRUPT)

    def _in_main_thread(self, signum: int, frame: FrameType | None) -> None:
        if not self._is_over and self._told.is_set():
            self._is_over = True
            self._leave()

    def _leave(self) -> NoReturn:
        saved = self._checkpoint is not None and self._saves(self._checkpoint)
        self._on_stop(saved)
        self._process.say_goodbye(0)
        leave(0)
        raise AssertionError("os._exit returned")

    def _saves(self, checkpoint: Callable[[], object]) -> bool:
        try:
            checkpoint()
        except BaseException:
            print("hpc-det: checkpoint() failed; the next attempt finds what was saved before", file=sys.stderr)
            traceback.print_exc()
            return False
        return True
