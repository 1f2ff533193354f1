"""What a rank's process needs before torch is imported and after it failed: its log, the connection to the agent, the
stop signals, and the note of a failure.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpc_det.errors import HpcDetError, InvalidHP
from hpc_det.node import full_disk
from hpc_det.node.agent_socket import report_exit, say_hello
from hpc_det.node.files import make_folders, open_log, take_umask_of
from hpc_det.node.heartbeat import Heartbeat
from hpc_det.node.lines import Line, connect_local
from hpc_det.node.process import STOP_SIGNALS, SignalPipe
from hpc_det.store.attempt import Attempt, failure_now, note_failure


@dataclass(frozen=True, kw_only=True)
class RankProcess:
    """What the rank's process sets up before torch is imported."""

    attempt: Attempt
    signals: SignalPipe
    line: Line
    heartbeat: Heartbeat

    def report_exit(self, code: int) -> None:
        """Send the exit code to the agent, after the output is flushed: the agent then kills a failed rank."""
        flush_output()
        report_exit(self.line, code)


def join_gang(env: Mapping[str, str]) -> RankProcess:
    """Say hello to the agent. From now on what this process prints goes to its log, and signals wait to be read."""
    attempt, rank = Attempt.from_env(env), int(env["RANK"])
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
    return process


def note_error(attempt: Attempt, rank: int | None, error: BaseException) -> None:
    """What ended the rank, for the job to see. `rank` None: there is none yet."""
    if full := full_disk.cause_in(error):
        trace = "".join(traceback.format_exception(error))
        failure = failure_now(rank, full_disk.sentence(full), traceback=trace, disk_full=True)
    elif isinstance(error, HpcDetError):
        failure = failure_now(rank, str(error), user_error=True, invalid_hp=isinstance(error, InvalidHP))
    else:
        trace = "".join(traceback.format_exception(error))
        failure = failure_now(rank, f"{type(error).__name__}: {error}", traceback=trace)
    note_failure(attempt.trial, attempt.number, failure)


def _let_go(*lines: Line) -> None:
    """A forked child, a DataLoader's worker, is no rank: its end of the line would hide that the rank is gone."""
    for line in lines:
        line.connection.close()


def log_to(path: Path) -> None:
    """Everything this process and its children print, from now on."""
    make_folders(path.parent)
    descriptor = open_log(path)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def leave(code: int) -> None:
    """Without interpreter shutdown, where gloo's threads abort in 5 of 24 runs after a good training (measured)."""
    flush_output()
    os._exit(code)


def flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
