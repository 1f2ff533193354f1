"""Starts many real node agents on this machine, for tests.benchmarks.scale, in place of srun.

    python -m tests.benchmarks.scale_agents TRIAL_FOLDER ATTEMPT WORKER

The agents are forked from this process, which has imported hpc_det.launch.agent, so that they share most of their
memory. Each counts its messages and its file operations, and records when it has learned of an event, in a table that
all processes share.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

from hpc_det.launch import agent, orders
from hpc_det.launch.attempt_on_node import AttemptOnNode
from hpc_det.launch.watch import health, supervisor
from hpc_det.node.agent_socket import AgentSocket
from hpc_det.node.lines import Line

TABLE, NODES, FOLDER = "SCALE_TABLE", "SCALE_TABLE_NODES", "SCALE_TABLE_FOLDER"
"""Variables: the file with the table, the number of agents, and the folder whose operations are counted."""
AT_A_TIME = 24
"""Agents that start at a time: a node has its own cores, these agents share two."""
LONG_S = 120.0
"""Seconds for connections and health checks."""
PID, MESSAGES, BYTES, FILES, LOGS, KNOWS, STOPPED, ENDED, WIDTH = range(9)
"""Columns: process id; messages and bytes sent; file operations, those on logs separately; monotonic times at which the
agent had the rendezvous, sent a stop to its ranks, and ended its attempt.
"""
_BY_PATH = (
    "stat lstat listdir scandir mkdir rename replace unlink remove rmdir link symlink readlink access chmod utime"
)
"""Functions of `os` that are an operation of the file server on a path, besides open."""


class Table:
    """One row of numbers per agent, in shared memory."""

    def __init__(self, path: str, nodes: int) -> None:
        with open(path, "r+b") as file:
            self.cells = memoryview(mmap.mmap(file.fileno(), 8 * WIDTH * nodes)).cast("d")

    @staticmethod
    def create(path: str, nodes: int) -> Table:
        with open(path, "wb") as file:
            file.truncate(8 * WIDTH * nodes)
        return Table(path, nodes)

    def column(self, column: int) -> list[float]:
        return [self.cells[at] for at in range(column, len(self.cells), WIDTH)]

    def clear(self, *columns: int) -> None:
        for column in columns:
            for at in range(column, len(self.cells), WIDTH):
                self.cells[at] = 0.0


class Recorder:
    """Records what this process does in the row of its agent; its forked children record in the same row."""

    def __init__(self, table: Table, folder: str) -> None:
        self._cells = table.cells
        self._folder = folder
        self._row = 0
        self._install()

    def record(self, node: int) -> None:
        """Record from now on as the agent of this node."""
        self._row = node * WIDTH
        self._cells[self._row + PID] = os.getpid()

    def _install(self) -> None:
        sys.addaudithook(lambda event, values: self._count_file(values[0]) if event == "open" else None)
        for name in _BY_PATH.split():
            setattr(os, name, self._counted(getattr(os, name)))
        plain = Line._put

        def put(line: Line, unsealed: Any) -> None:
            self._cells[self._row + MESSAGES] += 1
            self._cells[self._row + BYTES] += len(unsealed._head) + len(unsealed.body) + 76
            plain(line, unsealed)

        Line._put = put  # type: ignore[method-assign, assignment]
        self._note_time(AttemptOnNode, "_meet", KNOWS)
        self._note_time(AgentSocket, "send_stop", STOPPED)
        self._note_time(AttemptOnNode, "_end", ENDED)

    def _note_time(self, owner: type, method: str, column: int) -> None:
        """Record the time of the first call of a method after the column was cleared."""
        plain = getattr(owner, method)

        def call(*arguments: Any) -> Any:
            result = plain(*arguments)
            if not self._cells[self._row + column]:
                self._cells[self._row + column] = time.monotonic()
            return result

        setattr(owner, method, call)

    def _counted(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self._count_file(arguments[0] if arguments else None)
            return plain(*arguments, **named)

        return call

    def _count_file(self, path: Any) -> None:
        with suppress(TypeError):  # a descriptor
            if (name := os.fsdecode(path)).startswith(self._folder):
                self._cells[self._row + (LOGS if "/logs/" in name else FILES)] += 1


def main(arguments: list[str]) -> int:
    nodes = int(os.environ.pop(NODES))
    table = Table(os.environ.pop(TABLE), nodes)
    recorder = Recorder(table, os.environ.pop(FOLDER))
    # Agents that share two cores take longer than the agents of nodes may.
    supervisor.ANSWER_S = orders._CONNECT_S = health.ANSWER_S = LONG_S  # type: ignore[attr-defined]
    agent.guarded = nullcontext  # type: ignore[assignment, attr-defined]  # a process per node that takes no part
    os.environ["SLURM_JOB_NODELIST"] = f"node[1-{nodes}]"
    agents = set()
    for node in range(nodes):
        while node and node - sum(map(bool, table.column(KNOWS))) > (AT_A_TIME if node > 1 else 0):
            time.sleep(0.01)
        if not (pid := os.fork()):
            _run(recorder, node, arguments)
        agents.add(pid)
    code = 0
    while agents:
        pid, status = os.wait()
        agents.discard(pid)
        code = max(code, os.waitstatus_to_exitcode(status) != 0)
    return code


def _run(recorder: Recorder, node: int, arguments: list[str]) -> None:
    """Be the agent of a node, and exit."""
    code = 1
    try:
        os.environ["SLURM_NODEID"] = str(node)
        recorder.record(node)
        code = agent.main(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
