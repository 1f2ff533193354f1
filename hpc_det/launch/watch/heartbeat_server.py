"""The agent's end of its ranks' heartbeats: it asks all of them, and keeps what each sent last."""

from __future__ import annotations

import os
from contextlib import suppress

from hpc_det.node.agent_socket import AgentSocket, number_in
from hpc_det.node.frames import BrokenRule, Head
from hpc_det.node.heartbeat import STACKS_SIGNAL
from hpc_det.node.lines import Line


class HeartbeatServer:
    """What a heartbeat sends is described in hpc_det.node.heartbeat."""

    def __init__(self, socket: AgentSocket) -> None:
        self._lines: dict[int, Line] = {}
        self._last: dict[int, Head] = {}
        self._news: dict[int, Head] = {}
        self._asked: set[int] = set()
        """Those that have not answered yet."""
        socket.on_heartbeat = self._take

    def ask(self, what: str) -> None:
        """A rank that owes an answer is not asked for progress again: what it does not read would pile up."""
        for rank, line in self._lines.items():
            if what == "stacks" or rank not in self._asked:
                line.send({"ask": what})
        self._asked = set(self._lines)

    def news(self) -> list[Head]:
        """What they sent since the last call."""
        news, self._news = list(self._news.values()), {}
        return news

    def force_stacks(self) -> None:
        """From ranks that do not answer: by a signal, which needs nothing of their interpreters."""
        for rank in self._asked:
            with suppress(OSError):
                os.kill(self._lines[rank].identity["pid"], STACKS_SIGNAL)  # its number here, also in a container

    def report_silent(self) -> None:
        """As news: these ranks have not answered."""
        for rank in self._asked:
            self._news[rank] = {**self._last[rank], "at": "no answer, a C call may keep the interpreter's lock"}

    def _take(self, line: Line, message: Head) -> None:
        """Raises BrokenRule."""
        rank = number_in(message, "heartbeat")
        _check(message)
        self._lines[rank] = line
        self._asked.discard(rank)
        self._last[rank] = self._news[rank] = message


def _check(message: Head) -> None:
    """Node 0 takes it as it is. Raises BrokenRule."""
    for name in ("steps", "alone", "batch"):
        number_in(message, name)
    if not isinstance(message.get("phase"), str) or not isinstance(message.get("at", ""), str):
        raise BrokenRule
    if type(message.get("warm")) is not bool:
        raise BrokenRule
