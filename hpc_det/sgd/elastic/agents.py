"""How a node agent is started, whoever does it (hpc_det.sgd.capacity), and what a job of ours runs in each of its
tasks: one node agent, which submitit starts from a pickle.
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
# The log is named on the node itself. A node agent that is replaced goes on in the log of the one before.
_INTO_LOG = 'exec "$@" >>"$0/node-$(uname -n).log" 2>&1'
POLL_S = 0.5


def arguments(run: Path, slots: int) -> tuple[str, ...]:
    """Python's, for a node agent with room for so many ranks."""
    return ("-m", MODULE, str(run), str(slots))


def into_log(run: Path, command: Sequence[str]) -> list[str]:
    """`command`, printing into RUN/logs/node-HOST.log wherever it runs."""
    return ["/bin/sh", "-c", _INTO_LOG, str(RunFolder(run).logs), *command]


class BackOff:
    """When something that ended may be started again: 1 s after its last start, then 2 s, 4 s ... up to `most_s`.

    What was started more than `lasted_s` ago was well, and is started again as if for the first time.
    """

    def __init__(self, most_s: float = 30.0, lasted_s: float = 60.0) -> None:
        self._most_s = most_s
        self._lasted_s = lasted_s
        self._started = float("-inf")
        self._wait_s = 0.0

    def is_due(self) -> bool:
        return time.monotonic() >= self._started + self._wait_s

    def begin(self) -> None:
        """It is started now."""
        now = time.monotonic()
        lasted = now - self._started > self._lasted_s
        self._wait_s = 1.0 if lasted else min(2 * self._wait_s, self._most_s)
        self._started = now


@dataclass(frozen=True)
class AgentTask:
    """Returns the agent's exit code.

    submitit's own handlers take no notice of TERM, and put the job back into the queue on USR2. Those are replaced
    here: the agent hears what the scheduler sends. Where PBS is, or with proctrack/cgroup, nobody else would tell it.
    """

    run: str
    arguments: tuple[str, ...]
    """Python's."""

    def __call__(self) -> int:
        signals = SignalPipe((*STOP_SIGNALS, signal.SIGCHLD))
        adopt_orphans()
        again = BackOff()
        again.begin()
        code, warned = self._life(signals)
        while code < 0 and not warned:  # killed, and nobody said that its node shall go
            while not again.is_due():
                time.sleep(POLL_S)
            again.begin()
            code, warned = self._life(signals)
        end_descendants()
        signals.close()
        return code

    def checkpoint(self) -> None:
        """submitit asks for it before its handlers are replaced: it need not come back, the driver sees to that."""

    def _life(self, signals: SignalPipe) -> tuple[int, bool]:
        command = into_log(Path(self.run), [sys.executable, *self.arguments])
        agent = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=ends_with_parent)
        warned = False
        while agent.poll() is None:
            select.select([signals.fd], [], [], POLL_S)
            for number in set(signals.received()) & set(STOP_SIGNALS):
                agent.send_signal(number)
                warned = True
        return agent.returncode, warned
