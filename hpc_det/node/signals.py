"""Signals as events: the handler sets a flag and does nothing else; a pipe wakes whoever waits."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from weakref import WeakSet

# Slurm sends TERM (preemption) or the `--signal` of the script (USR2); PBS sends TERM; sites may choose USR1.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class SignalPipe:
    """Turns signals into bytes that make `fd` readable, even while the main thread is inside a C call (signal(7)).

    In a forked child they have their default actions again: the pipe is the parent's, and so are the news in it.
    """

    def __init__(self, signals: Iterable[signal.Signals]) -> None:
        self._signals = frozenset(signals)
        self.fd, self._write = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write, False)
        self._former_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._former = {number: signal.signal(number, _nothing) for number in self._signals}
        _open.add(self)

    def received(self) -> list[signal.Signals]:
        """The signals since the last call. CHLD and others come through the pipe too, where a library handles them."""
        try:
            numbers = os.read(self.fd, 4096)
        except BlockingIOError:
            return []
        return [signal.Signals(number) for number in numbers if number in self._signals]

    def close(self) -> None:
        """As before it was made."""
        _open.discard(self)
        signal.set_wakeup_fd(self._former_fd)
        for number, handler in self._former.items():
            signal.signal(number, handler)
        os.close(self.fd)
        os.close(self._write)

    def _let_go(self) -> None:
        signal.set_wakeup_fd(-1)
        for number in self._signals:
            signal.signal(number, signal.SIG_DFL)


_open: WeakSet[SignalPipe] = WeakSet()


def _let_go() -> None:
    for pipe in list(_open):
        pipe._let_go()


os.register_at_fork(after_in_child=_let_go)


def _nothing(signum: int, frame: FrameType | None) -> None:
    """The wake-up pipe carries the news; this only keeps the default action away."""


def shielded() -> Callable[[], None]:
    """For Popen's `preexec_fn`: the child and its launcher ignore the stop signals, which the agent answers.

    torchrun dies of USR1 and USR2 and leaves its ranks behind; mpirun kills them a second after TERM (measured). With
    proctrack/linuxproc Slurm signals every descendant, so a session of its own is not shelter enough.
    """

    def ignore() -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    return ignore


@contextmanager
def uninterrupted() -> Iterator[None]:
    """A Ctrl-C is heard at the end of this block, or of what it decorates; in other threads than main there is none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    former = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
        if came:
            signal.raise_signal(signal.SIGINT)


def turn_deaf() -> None:
    """This process and all that it starts hear no stop signal, until one of them calls `hear_again`.

    For launchers that set handlers of their own, as mpirun and deepspeed do: what is ignored they would hear again,
    what is blocked they do not (signal(7)). bash hands that on, dash does not. srun takes its signals all the same.
    """
    shielded()()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def hear_again() -> None:
    """Of a rank that a deaf launcher started: signals are ignored, and arrive where it sets handlers."""
    shielded()()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
