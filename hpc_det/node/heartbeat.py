"""A rank's heartbeat: a thread that answers its agent, on a line of its own, whatever the main thread is doing.

agent -> rank: {"ask": "progress" | "stacks"}; rank -> agent: {"heartbeat": RANK} with its Progress, and for stacks with
"at", the place in the main thread, after the stacks of all threads went to the rank's log. Nobody asks where nobody
watches, and then the thread costs nothing. A process that cannot answer, because a C call keeps the interpreter's lock,
still writes its stacks when it gets STACKS_SIGNAL.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple

from hpc_det.node.lines import connect_local

STACKS_SIGNAL = signal.SIGRTMIN + 7
"""A real-time signal: schedulers, launchers and libraries send none of these."""
_STDERR = 2

Phase = Literal["outside", "meeting", "between steps", "training", "validation", "setup", "function", "loop"]


class Progress(NamedTuple):
    phase: Phase
    steps: int
    """Rises with every one, and at the same places in all ranks."""
    alone: int = 0
    """Rises with those in between that not all ranks have."""
    warm: bool = False
    """Whether this loop has done a step before: the first may compile for long."""
    batch: int = 0
    """Of the loop that it is in, or was in last."""


class Heartbeat:
    def __init__(self, socket: str, rank: int) -> None:
        self.progress: Callable[[], Progress] = lambda: Progress("outside", 0)
        """What the main thread is doing; called by another thread."""
        self._rank = rank
        self.line = connect_local(socket)
        faulthandler.register(STACKS_SIGNAL, file=_STDERR, all_threads=True)
        self._send({})
        threading.Thread(target=self._answer, name="heartbeat", daemon=True).start()

    def _answer(self) -> None:
        while (message := self.line.receive()) is not None:
            if message.head.get("ask") == "stacks":
                faulthandler.dump_traceback(file=_STDERR, all_threads=True)
                self._send({"at": place_of_main_thread()})
            elif message.head.get("ask") == "progress":
                self._send({})

    def _send(self, more: dict[str, Any]) -> None:
        self.line.send({"heartbeat": self._rank, **self.progress()._asdict(), **more})


def place_of_main_thread() -> str:
    """Its innermost call, and where that is a library's, the one that is not: "wait (threading.py:327) in ..."."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    calls = []
    while frame:
        calls.append(frame)
        frame = frame.f_back
    own = next((call for call in calls if not _is_of_a_library(call)), None)
    named = [calls[0], *([own] if own and own is not calls[0] else [])] if calls else []
    return " in ".join(map(_name, named))


def _is_of_a_library(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return path.startswith((*_LIBRARIES, "<"))


_LIBRARIES = tuple({str(Path(module.__file__ or "").parent) for module in (threading,)} | {sys.prefix})


def _name(frame: FrameType) -> str:
    return f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
