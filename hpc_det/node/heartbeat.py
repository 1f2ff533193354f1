"""The heartbeat of a rank: a thread that answers the node's agent at any time, also while the main thread is busy.

Over its own connection to the agent's socket it receives {"ask": "progress" | "stacks"}. It answers {"heartbeat": RANK}
with the fields of its Progress; for stacks it first writes the stacks of all threads to the rank's log, and adds "at",
the main thread's position in the code. If hang detection is disabled, the agent asks rank 0 alone, for the progress
that commands show. A process that cannot answer, because a C call holds the interpreter's lock, still writes its stacks
when it receives STACKS_SIGNAL.
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
"""A real-time signal, because schedulers, launchers and libraries send none of these."""
_STDERR = 2
"""File descriptor of the rank's log."""

Phase = Literal["outside", "meeting", "between steps", "training", "validation", "setup", "function", "loop"]
"""What a rank is doing; hpc_det.launch.watch.hang has a limit for each phase.

A trial class is "between steps" or in a loop over batches, "training" or "validation"; before these it waits at
"meeting" for the other ranks. Ranks of hpc_det.sgd run functions of the user ("setup", "function", "loop"). "outside"
is everything else.
"""


class Progress(NamedTuple):
    """The position of a rank in its training, as the hang detector compares it."""

    phase: Phase
    steps: int
    """Number of steps done; rises at the same places of the program in all ranks."""
    alone: int = 0
    """Number of events between the steps that do not occur on all ranks."""
    warm: bool = False
    """True if this loop has done a step before; the first one may compile for a long time."""
    batch: int = 0
    """Number of the batch in the current loop, or in the last one if no loop runs."""


class Heartbeat:
    """Answers the agent's questions about this rank."""

    def __init__(self, socket: str, rank: int) -> None:
        self.progress: Callable[[], Progress] = lambda: Progress("outside", 0)
        """Returns what the main thread is doing; called by the heartbeat thread."""
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
    """Return the innermost call of the main thread and, if that is in a library, the innermost one that is not.

    Example: "wait (threading.py:327) in train (model.py:12)".
    """
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
