"""Work in threads: files and schedulers may be slow, and the screen must answer keys meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from textual.message import Message
from textual.message_pump import MessagePump

from hpc_det.errors import HpcDetError


class Said(Message):
    """A thread, or a function that it called, has a text for the status line."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text


class Tasks:
    """Functions that run in threads and post their results to `owner`, an app or a screen."""

    def __init__(self, owner: MessagePump, start: Callable[[Callable[[], None]], object]) -> None:
        """`start` runs a function in a thread."""
        self._owner, self._start = owner, start
        self._busy: set[str] = set()
        """The names of the functions that are running."""

    def run(self, name: str, act: Callable[[], Message | None]) -> None:
        """Run `act` in a thread and post its message, or its error for the status line.

        Does nothing while a function with the same name runs: a slow scheduler must not accumulate threads.
        """
        if name not in self._busy:
            self._busy.add(name)
            self._start(partial(self._run, name, act))

    def _run(self, name: str, act: Callable[[], Message | None]) -> None:
        message: Message | None = None
        try:
            message = act()
        except HpcDetError as error:
            message = Said("; ".join(error.problems))
        except OSError as error:
            message = Said(f"{error.filename}: {error.strerror}")
        finally:
            self._busy.discard(name)
        if message:
            self._owner.post_message(message)
