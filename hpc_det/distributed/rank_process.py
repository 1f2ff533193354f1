"""A rank's process outside of its training: its log, its connection to the agent, stop signals and recorded failures.

Nothing here imports torch.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hpc_det.errors import HpcDetError, InvalidHP, UsageError
from hpc_det.node import disk, full_disk
from hpc_det.node.agent_socket import report_exit, say_hello
from hpc_det.node.files import make_folders, open_log, take_umask_of
from hpc_det.node.forking import flush_output
from hpc_det.node.heartbeat import Heartbeat
from hpc_det.node.lines import Line, connect_local
from hpc_det.node.process import STOP_SIGNALS, SignalPipe
from hpc_det.store.attempt import Attempt, Failure, failure_now, note_failure

_INSTALLED = re.compile(r"/(?:site|dist)-packages/")
"""Folders of installed packages, also of the Python below a virtual environment, and of the user."""
_PACKAGE = str(Path(__file__).parents[1])
"""The folder of hpc_det, which may be a checkout."""


@dataclass(frozen=True, kw_only=True)
class RankProcess:
    """The parts of a rank's process that exist before torch is imported."""

    attempt: Attempt
    signals: SignalPipe
    line: Line
    heartbeat: Heartbeat

    def report_exit(self, code: int) -> None:
        """Send the exit code to the agent. Output is flushed first, because the agent then kills a failed rank."""
        flush_output()
        report_exit(self.line, code)


class Host(Protocol):
    """A program that has joined the gang and then runs code of a user, which may enter `hpc_det.core.init`."""

    process: RankProcess

    def handing_stops_over(self) -> AbstractContextManager[bool]:
        """Leave the connection to the agent, and the signals, to a run for the length of the block.

        It yields whether a stop was requested before.
        """
        ...

    def run_ended(self, outcome: dict[str, Any]) -> None:
        """Take the outcome of the run, instead of its file. Called on every rank."""
        ...


host: Host | None = None
"""The program that has joined the gang in this process; None if the user's code joins it itself."""


_joined: list[RankProcess] = []
"""The process that `join_gang` returned, if it was called."""


def join_gang(env: Mapping[str, str]) -> RankProcess:
    """Connect to the agent and report this rank to it.

    From then on the output of this process goes to the rank's log, and stop signals wait in a pipe. Raises UsageError
    if this process has joined before: the agent sends no stop requests to a rank whose run has ended.
    """
    attempt, rank = Attempt.from_env(env), int(env["RANK"])
    if _joined:
        error = UsageError(
            "init: this process has entered the run of its job before, and a job has one run; put the whole training "
            "into one `with` block"
        )
        note_error(attempt, rank, error)
        disk.unlink(attempt.trial.outcome, missing_ok=True)  # that of the run before, which would count as the trial's
        raise error
    take_umask_of(attempt.trial.path)
    log_to(attempt.trial.rank_log(attempt.number, rank))
    process = RankProcess(
        attempt=attempt,
        signals=SignalPipe(STOP_SIGNALS),
        line=connect_local(attempt.socket),
        heartbeat=Heartbeat(attempt.socket, rank),
    )
    os.register_at_fork(after_in_child=lambda: _let_go(process.line, process.heartbeat.line))
    say_hello(process.line, rank, os.getpid())
    _joined.append(process)
    return process


def _let_go(*lines: Line) -> None:
    """Close inherited connections in a forked child, such as a DataLoader's worker."""
    # Its copy of a connection would keep it open after the rank has exited, so the agent would not notice the exit.
    for line in lines:
        line.connection.close()


class StopListener:
    """A thread that waits for a stop request from the agent, or a signal to this process, and gives notice of it
    (hpc_det.distributed.preempt).
    """

    def __init__(self, signals: SignalPipe, line: Line | None, give_notice: Callable[[float | None], None]) -> None:
        """`give_notice` takes the deadline in seconds since the epoch; None if it is not known."""
        self._signals = signals
        self._line = line
        self._give_notice = give_notice
        self._end, self._end_by = os.pipe()
        self._thread = threading.Thread(target=self._listen, name="stop-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; later requests and signals are ignored."""
        os.write(self._end_by, b"end")
        self._thread.join()
        os.close(self._end)
        os.close(self._end_by)

    def _listen(self) -> None:
        sources: list[int] = [self._end, self._signals.fd, *([self._line.connection.fileno()] if self._line else [])]
        selector = selectors.PollSelector()  # select(2) refuses descriptors above 1023, and a large gang has as many
        for source in sources:
            selector.register(source, selectors.EVENT_READ)
        while True:
            ready = [key.fd for key, _ in selector.select()]
            if self._end in ready:
                return
            if self._signals.fd in ready:
                self._on_signals(self._signals.received())
            if self._line and self._line.connection.fileno() in ready:
                self._on_line(self._line)

    def _on_signals(self, received: list[signal.Signals]) -> None:
        """Forward signals to the agent, which notifies all ranks; a rank without an agent gives notice itself."""
        for number in received:
            if self._line:
                self._line.send({"signal": number.name})
            else:  # the gang was started by hand, without an agent
                self._give_notice(None)

    def _on_line(self, line: Line) -> None:
        messages = line.receive_some()
        if messages is None:
            print("hpc-det: the node agent has exited; this rank exits", file=sys.stderr, flush=True)
            os._exit(1)
        for message in messages:
            if "stop" in message.head:
                self._give_notice(message.head.get("deadline"))


def note_error(attempt: Attempt, rank: int | None, error: BaseException) -> None:
    """Record the error that ended the rank in the attempt. `rank` None: the process had no rank yet."""
    note_failure(attempt.trial, attempt.number, failure_of(rank, error))


def failure_of(rank: int | None, error: BaseException) -> Failure:
    """Return the failure of the rank that `error` has ended. `rank` None: the process had no rank yet."""
    full = full_disk.cause_in(error)
    if not full and isinstance(error, HpcDetError):
        return failure_now(rank, str(error), user_error=True, invalid_hp=isinstance(error, InvalidHP))
    trace = "".join(traceback.format_exception(error))
    if full:
        return failure_now(rank, full_disk.sentence(full), traceback=trace, disk_full=True)
    return failure_now(rank, f"{type(error).__name__}: {error}", place=_place(error), traceback=trace)


def _place(error: BaseException) -> str:
    """Return file and line of the innermost call in code that is not installed; "" if all of it is."""
    library = tuple(os.path.join(path, "") for path in (sysconfig.get_path("stdlib"), _PACKAGE))
    calls = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [(file, line) for file, line in calls if not (file.startswith((*library, "<")) or _INSTALLED.search(file))]
    if not own:
        return ""
    file, line = own[-1]
    root = max((path for path in sys.path if path and file.startswith(os.path.join(path, ""))), key=len, default="")
    return f"{file[len(root) :].lstrip(os.sep) if root else file}:{line}"


def log_to(path: Path) -> None:
    """Send everything that this process and its children print from now on to the file `path`."""
    make_folders(path.parent)
    descriptor = open_log(path)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
