"""The command line of a node agent, and the task of a submitted job that runs one.

The capacities (hpc_det.sgd.capacity) start agents; in a job submitit starts an AgentTask from a pickle.
"""

from __future__ import annotations

import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_det.node.process import STOP_SIGNALS, SignalPipe, adopt_orphans, end_descendants, ends_with_parent
from hpc_det.store.run_folder import RunFolder

MODULE = "hpc_det.sgd.elastic.node"
# A shell on the node inserts its host name: the starter may start agents on many hosts with one command.
# Appending lets an agent continue the log of the one that it replaces.
_INTO_LOG = 'exec "$@" >>"$0/node-$(uname -n).log" 2>&1'
POLL_S = 0.5
"""Seconds between two checks of an agent and of its restart delay."""


def arguments(run: Path, slots: int) -> tuple[str, ...]:
    """Return Python's command-line arguments for a node agent with `slots` slots. `run`: the run folder."""
    return ("-m", MODULE, str(run), str(slots))


def into_log(run: Path, command: Sequence[str]) -> list[str]:
    """Return a command that runs `command` with its output appended to RUN/logs/node-HOST.log."""
    return ["/bin/sh", "-c", _INTO_LOG, str(RunFolder(run).logs), *command]


class BackOff:
    """The shortest times from one start of a process to the next: 1 s, then 2 s, 4 s, ... up to `most_s` seconds.

    A process that was started more than `lasted_s` seconds after the start before counts as stable: the next time is
    1 s again.
    """

    def __init__(self, most_s: float = 30.0, lasted_s: float = 60.0) -> None:
        self._most_s = most_s
        self._lasted_s = lasted_s
        self._started = float("-inf")
        self._wait_s = 0.0
        self.starts = 0
        """Number of starts of the process."""

    def is_due(self) -> bool:
        """Return whether the delay has passed."""
        return time.monotonic() >= self._started + self._wait_s

    def begin(self) -> None:
        """Record that the process is started now."""
        self.starts += 1
        now = time.monotonic()
        lasted = now - self._started > self._lasted_s
        self._wait_s = 1.0 if lasted else min(2 * self._wait_s, self._most_s)
        self._started = now


@dataclass(frozen=True)
class AgentTask:
    """The task of a submitted job: runs a node agent, starts it again if it is killed, and exits with its exit code."""

    run: str
    """Path of the run folder."""
    arguments: tuple[str, ...]
    """Arguments for Python, from `arguments`."""

    def __call__(self) -> None:
        # SignalPipe replaces submitit's handlers, which ignore TERM and requeue the job on USR2. The signals are passed
        # on to the agent, because on PBS and with proctrack/cgroup only this process gets them.
        signals = SignalPipe((*STOP_SIGNALS, signal.SIGCHLD))
        adopt_orphans()
        again = BackOff()
        again.begin()
        code, warned = self._life(signals)
        while code < 0 and not warned:  # killed, without a notice that the node is taken away
            while not again.is_due():
                time.sleep(POLL_S)
            again.begin()
            code, warned = self._life(signals)
        end_descendants()
        signals.close()
        if code > 0:
            # submitit would end a task that returned a value with exit code 0, and one that raised an Exception with a
            # traceback.
            raise SystemExit(code)

    def checkpoint(self) -> None:
        """Return None: submitit need not requeue this job, because the driver submits another one.

        submitit calls this on a signal that arrives before its handlers are replaced.
        """

    def _life(self, signals: SignalPipe) -> tuple[int, bool]:
        """Run one agent to its end, passing stop signals on; return its exit code and whether there was a signal."""
        command = into_log(Path(self.run), [sys.executable, *self.arguments])
        agent = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=ends_with_parent)
        warned = False
        while agent.poll() is None:
            select.select([signals.fd], [], [], POLL_S)
            for number in set(signals.received()) & set(STOP_SIGNALS):
                agent.send_signal(number)
                warned = True
        return agent.returncode, warned
