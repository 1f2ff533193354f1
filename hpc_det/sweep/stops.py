"""Stopping an app: its checkpoint() is called, and then the rank exits.

An app that calls `may_stop` in its loop is stopped there, in the normal flow of its main thread, and all ranks of a
gang at the same call. After its first call the signal handler does nothing.

An app that never calls `may_stop` runs unchanged, and its checkpoint() is called anywhere, even while its main thread
waits in a system call, such as for the end of a program that it started. This is the one exception to the rule that a
signal handler only sets a flag: in a system call, only a handler gets control of the main thread, and Python resumes
the call afterwards (PEP 475). So checkpoint() runs in the handler, which Python calls between two instructions of the
main thread, and not before a computation in C, such as a collective, has returned. The alternatives fail:

- a flag that a trace function or a pending call reads is not read before the system call has returned;
- an exception from the handler runs the app's `except` and `finally` first, and the app may swallow it;
- checkpoint() in another thread waits forever for a lock that the main thread holds.

Each rank of a gang is then interrupted separately.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from types import FrameType
from typing import NoReturn, Protocol

from hpc_det.distributed.rank_process import RankProcess, leave
from hpc_det.errors import UsageError

INTERRUPT = signal.SIGURG
"""Signal that interrupts the main thread. It is ignored by default, so it is harmless if an app removes our handler."""

current: Stops | None = None
"""The stops of this process, if it is a rank."""


class Stops:
    """Handles stops of a rank from its creation on; `on_stop` runs in the main thread right before the exit."""

    def __init__(self, process: RankProcess, on_stop: Callable[[bool], None]) -> None:
        self._process = process
        self._on_stop = on_stop
        self._checkpoint: Callable[[], object] | None = None
        self._told = threading.Event()
        self._agreement: Agreement | None = None
        self._calls_may_stop = False
        self._is_over = False
        signal.signal(INTERRUPT, self._interrupted)
        threading.Thread(target=self._listen, name="stops", daemon=True).start()

    def set_checkpoint(self, checkpoint: Callable[[], object] | None) -> None:
        """Call the app's `checkpoint` at a stop before the rank exits; without one, the rank only exits."""
        self._checkpoint = checkpoint

    def may_stop(self) -> None:
        """Stop here if requested. After the first call, the app is stopped only in such calls.

        Raises UsageError in a gang without a process group.
        """
        if self._agreement is None:
            self._agreement = self._agreed()
            if self._told.is_set():  # who was told a moment ago did not know of it
                self._agreement.give_notice()
        if self._agreement.should_stop():
            self._leave()

    def _agreed(self) -> Agreement:
        """Return the agreement of the ranks. If it fails, the app continues as one that never calls `may_stop`, with a
        stop pending.
        """
        self._calls_may_stop = True
        try:
            return agreement(os.environ)
        except UsageError:
            self._calls_may_stop = False
            signal.raise_signal(INTERRUPT)
            raise

    def end(self, wait_s: float = 0.0) -> None:
        """Ignore stops, since the app has ended, except those that arrive within `wait_s` seconds."""
        self._told.wait(wait_s)
        self._is_over = True

    def _listen(self) -> None:
        line, signals = self._process.line, self._process.signals
        while True:
            ready = select.select([line.connection.fileno(), signals.fd], [], [])[0]
            if signals.fd in ready:
                for number in signals.received():  # the agent tells all ranks to stop
                    line.send({"signal": number.name})
            if line.connection.fileno() not in ready:
                continue
            messages = line.receive_some()
            if messages is None:
                print("hpc-det: the node agent is gone; this rank leaves", file=sys.stderr, flush=True)
                os._exit(1)
            if any("stop" in message.head for message in messages):
                self._interrupt()
                return

    def _interrupt(self) -> None:
        self._told.set()
        if self._agreement:
            self._agreement.give_notice()
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, INTERRUPT)

    def _interrupted(self, signum: int, frame: FrameType | None) -> None:
        """Handle the signal, in the main thread."""
        if self._told.is_set() and not (self._is_over or self._calls_may_stop):
            self._leave()

    def _leave(self) -> NoReturn:
        self._is_over = True
        saved = self._checkpoint is not None and self._saves(self._checkpoint)
        self._on_stop(saved)
        self._process.report_exit(0)
        leave(0)

    def _saves(self, checkpoint: Callable[[], object]) -> bool:
        try:
            checkpoint()
        except BaseException:
            print("hpc-det: checkpoint() failed; the next attempt finds what was saved before", file=sys.stderr)
            traceback.print_exc()
            return False
        return True


class Agreement(Protocol):
    def should_stop(self) -> bool:
        """Return the same for all ranks at the same call."""

    def give_notice(self) -> None:
        """Note a stop request. Any rank may do so, repeatedly."""


class Alone:
    """The agreement of a single rank."""

    def __init__(self) -> None:
        self._noticed = False

    def should_stop(self) -> bool:
        return self._noticed

    def give_notice(self) -> None:
        self._noticed = True


class InGang:
    """The agreement of a gang, over messages of its ranks, which are connected with the help of the process group."""

    def __init__(self, env: Mapping[str, str]) -> None:
        from hpc_det.distributed.collectives import Distributed
        from hpc_det.distributed.preempt import StopAgreement

        self._messages = Distributed.from_env(env).messages
        self._stop = StopAgreement(self._messages)

    def should_stop(self) -> bool:
        return self._stop.should_stop()

    def give_notice(self) -> None:
        from hpc_det.distributed.preempt import give_notice

        give_notice(self._messages)


def agreement(env: Mapping[str, str]) -> Agreement:
    """Return the agreement of the gang that `env` describes. Raises UsageError if its ranks cannot be connected."""
    if int(env["WORLD_SIZE"]) == 1:
        return Alone()
    import torch.distributed as dist

    if not dist.is_initialized():
        raise UsageError(
            "may_stop: the ranks of a gang agree over the process group; call torch.distributed.init_process_group "
            "before"
        )
    return InGang(env)
