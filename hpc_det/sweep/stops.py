"""Stopping an app: its checkpoint() is called, and then the rank exits.

An app that calls `may_stop` in its loop is stopped inside such a call, and all ranks of a gang at the same call. After
the first call the signal handler does nothing.

An app that never calls `may_stop` runs unchanged, and its checkpoint() is called anywhere, even while its main thread
waits in a system call, such as for the end of a program that it started. This is the one exception to the rule that a
signal handler only sets a flag: in a system call, only a handler gets control of the main thread, and Python resumes
the call afterwards (PEP 475). So checkpoint() runs in the handler, which Python calls between two instructions of the
main thread, and not before a computation in C, such as a collective, has returned. The alternatives fail:

- a flag that a trace function or a pending call reads is not read before the system call has returned;
- an exception from the handler runs the app's `except` and `finally` first, and the app may swallow it;
- checkpoint() in another thread waits forever for a lock that the main thread holds.

The ranks of a gang whose app never calls `may_stop` are interrupted separately, at different places.

Inside `hpc_det.core.init` the run handles stops (`Stops.handed_over`): it saves what it tracks, checkpoint() is not
called, and `may_stop` does nothing.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn, Protocol

from hpc_det.distributed.rank_process import RankProcess
from hpc_det.errors import UsageError
from hpc_det.node.forking import leave
from hpc_det.store.attempt import read_stop

INTERRUPT = signal.SIGURG
"""Signal that interrupts the main thread. It is ignored by default, so it is harmless if an app removes our handler."""

current: Stops | None = None
"""The object that handles the stops of this process; None if this process is not a rank of a sweep."""


class Stops:
    """Handles stops of a rank from its creation on; `on_stop` runs in the main thread right before the exit."""

    def __init__(self, process: RankProcess, on_stop: Callable[[bool], None]) -> None:
        self._process = process
        self._on_stop = on_stop
        self._checkpoint: Callable[[], object] | None = None
        self._told = threading.Event()
        """Set when a stop was requested."""
        self._agreement: Agreement | None = None
        """The agreement of the ranks on the call at which they stop; None before the first `may_stop`."""
        self._calls_may_stop = False
        """Whether the app has called `may_stop`, so that the signal handler must not stop it."""
        self._is_over = False
        """Whether the app has ended or is being stopped, so that further stop requests are ignored."""
        self._is_handed_over = False
        """Whether a run handles stops now."""
        self._end, self._end_by = os.pipe()
        signal.signal(INTERRUPT, self._interrupted)
        self._thread = self._started()

    def set_checkpoint(self, checkpoint: Callable[[], object] | None) -> None:
        """Set the function that is called at a stop before the rank exits; None: the rank only exits."""
        self._checkpoint = checkpoint

    def may_stop(self) -> None:
        """Stop here if requested. After the first call, the app is stopped only in such calls.

        Raises UsageError in a gang without a process group.
        """
        if self._is_handed_over:
            return
        if self._agreement is None:
            self._agreement = self._agreed()
            if self._told.is_set():  # a request that arrived before the agreement existed was not passed on to it
                self._agreement.give_notice()
        if self._agreement.should_stop():
            self._leave()

    @contextmanager
    def handed_over(self) -> Iterator[bool]:
        """Leave the agent's messages and the signals to a run for the length of the block.

        It yields whether a stop was requested before. A stop that was requested in the block, and that the run has not
        answered by stopping, takes effect after it.
        """
        self._is_handed_over = True
        os.write(self._end_by, b"end")
        self._thread.join()
        os.read(self._end, 3)
        try:
            yield self._told.is_set()
        finally:
            self._is_handed_over = False
            self._thread = self._started()

    def catch_up(self) -> None:
        """Stop the app if a stop was requested while a run handled stops."""
        attempt = self._process.attempt
        if read_stop(attempt.trial.stop, attempt.number):
            self._interrupt()

    def _started(self) -> threading.Thread:
        thread = threading.Thread(target=self._listen, name="stops", daemon=True)
        thread.start()
        return thread

    def _agreed(self) -> Agreement:
        """Return the agreement of the ranks.

        If it raises, the app counts as one that never calls `may_stop`: a stop that was requested meanwhile, and was
        ignored by the handler, takes effect now.
        """
        self._calls_may_stop = True
        try:
            return agreement(os.environ)
        except UsageError:
            self._calls_may_stop = False
            signal.raise_signal(INTERRUPT)
            raise

    def end(self, wait_s: float = 0.0) -> None:
        """Wait up to `wait_s` seconds for a stop request, and then ignore stops, because the app has ended."""
        self._told.wait(wait_s)
        self._is_over = True

    def _listen(self) -> None:
        """Wait for a stop request of the node agent, in a separate thread; exit if the agent is lost."""
        line, signals = self._process.line, self._process.signals
        while True:
            ready = select.select([line.connection.fileno(), signals.fd, self._end], [], [])[0]
            if self._end in ready:
                return
            if signals.fd in ready:
                for number in signals.received():  # reported to the agent, which sends a stop request to all ranks
                    line.send({"signal": number.name})
            if line.connection.fileno() not in ready:
                continue
            messages = line.receive_some()
            if messages is None:
                print("hpc-det: the node agent has exited; this rank exits", file=sys.stderr, flush=True)
                os._exit(1)
            if any("stop" in message.head for message in messages):
                self._interrupt()
                return

    def _interrupt(self) -> None:
        """Record the stop request, and interrupt the main thread."""
        self._told.set()
        if self._agreement:
            self._agreement.give_notice()
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, INTERRUPT)

    def _interrupted(self, signum: int, frame: FrameType | None) -> None:
        """Stop the app here, in the main thread, if a stop was requested and the app never calls `may_stop`."""
        if self._told.is_set() and not (self._is_over or self._calls_may_stop or self._is_handed_over):
            self._leave()

    def _leave(self) -> NoReturn:
        """Call the app's checkpoint(), report the exit, and exit with code 0."""
        self._is_over = True
        saved = self._checkpoint is not None and self._saves(self._checkpoint)
        self._on_stop(saved)
        self._process.report_exit(0)
        leave(0)

    def _saves(self, checkpoint: Callable[[], object]) -> bool:
        """Call `checkpoint`, and return whether it has returned without an exception."""
        try:
            checkpoint()
        except BaseException:
            print("hpc-det: checkpoint() failed; the next attempt finds what was saved before", file=sys.stderr)
            traceback.print_exc()
            return False
        return True


class Agreement(Protocol):
    """The agreement of a gang's ranks on the call of `may_stop` at which all of them stop."""

    def should_stop(self) -> bool:
        """Return whether to stop at this call; all ranks get the same answer at the same call."""

    def give_notice(self) -> None:
        """Record a stop request. Any rank may call this, also repeatedly and from another thread."""


class Alone:
    """The agreement of a single rank."""

    def __init__(self) -> None:
        self._noticed = False

    def should_stop(self) -> bool:
        return self._noticed

    def give_notice(self) -> None:
        self._noticed = True


class InGang:
    """The agreement of several ranks, which exchange messages; the process group is used to connect them."""

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
