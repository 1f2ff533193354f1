"""The exception that ends this program, for functions registered with atexit, which do not receive it."""

from __future__ import annotations

import sys
import threading
from typing import Any, NoReturn

_exit: SystemExit | None = None


def note_exit() -> None:
    """Let `uncaught` return the exceptions of later calls of `sys.exit` in the main thread."""
    former = sys.exit
    if hasattr(former, "is_noted"):
        return

    def noted(status: Any = None, /) -> NoReturn:
        global _exit
        if threading.current_thread() is threading.main_thread():
            _exit = SystemExit(status)
        former(status)

    noted.is_noted = True  # type: ignore[attr-defined]
    sys.exit = noted


def uncaught(but: tuple[BaseException, ...] = ()) -> tuple[BaseException, ...]:
    """Return the exception whose traceback was printed last, and that of the last `sys.exit`, except those in `but`.

    In an interactive session neither ends the program, and a program may catch that of `sys.exit`: pass what was
    returned before, while the program still ran. `raise SystemExit` leaves no trace.
    """
    known = (getattr(sys, "last_value", None), _exit)
    return tuple(error for error in known if error is not None and all(error is not other for other in but))
