"""What a job of ours runs in each of its tasks: one node agent. submitit pickles it."""

from __future__ import annotations

import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from hpc_det.node.process import STOP_SIGNALS, SignalPipe, adopt_orphans, end_descendants, ends_with_parent
from hpc_det.sgd.elastic.agents import BackOff, into_log

POLL_S = 0.5


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
