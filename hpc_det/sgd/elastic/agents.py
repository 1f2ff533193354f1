"""How a node agent is started, whoever does it (hpc_det.sgd.capacity)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from hpc_det.store.run_folder import RunFolder

MODULE = "hpc_det.sgd.elastic.node"
# The log is named on the node itself. A node agent that is replaced goes on in the log of the one before.
_INTO_LOG = 'exec "$@" >>"$0/node-$(uname -n).log" 2>&1'


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
