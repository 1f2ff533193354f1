"""The fork server: a process on each node that has imported torch and forks the ranks, so that a gang starts in 0.1 s.

    python3 -m hpc_det.sgd.rank.fork_server FD BUFFER...

It uses no GPU and starts no thread, so a forked rank is as clean as a fresh interpreter. FD is the socket to the node
agent, BUFFER... are the file descriptors of the node's snapshot buffers.

agent -> fork server: {"fork": order}, {"end": generation};
fork server -> agent: {"exited": rank, "code", "generation"}, {"ended": generation}.
"""

from __future__ import annotations

import gc
import os
import selectors
import signal
import socket
import sys
import traceback
from contextlib import suppress
from importlib import import_module
from typing import Any, NamedTuple

from hpc_det.distributed.rank_process import leave
from hpc_det.node.lines import Line, line_over
from hpc_det.node.process import SignalPipe, adopt_orphans, end_descendants, ends_with_parent

# Imported before the first fork, so that the ranks share the modules' memory and need not import them.
PRELOADED = (
    "hpc_det.sgd.rank.worker",
    "torch._dynamo",  # optimizers and DistributedDataParallel import it at their first step
)


class Child(NamedTuple):
    """A rank that was forked and has not exited."""

    rank: int
    generation: int


class ForkServer:
    """Forks ranks on request of the node agent, reports their exits, and ends them."""

    def __init__(self, line: Line, buffers: list[int]) -> None:
        self._line = line
        self._buffers = buffers
        self._children: dict[int, Child] = {}
        """The ranks that were forked and have not exited, by process id."""
        self._signals = SignalPipe([signal.SIGCHLD])
        self._selector = selectors.DefaultSelector()
        self._selector.register(line.connection, selectors.EVENT_READ, self._on_orders)
        self._selector.register(self._signals.fd, selectors.EVENT_READ, self._on_child)
        self._is_over = False

    def run(self) -> int:
        """Serve the node agent until its connection ends, then end all descendants. Return the exit code."""
        while not self._is_over:
            for key, _ in self._selector.select():
                key.data()
        end_descendants()
        return 0

    def _on_orders(self) -> None:
        orders = self._line.receive_some()
        self._is_over = orders is None
        for order in orders or []:
            if "fork" in order.head:
                self._fork(order.head["fork"])
            else:
                self._end(order.head["end"])

    def _fork(self, order: dict[str, Any]) -> None:
        pid = os.fork()
        if pid == 0:
            self._become_rank(order)
        self._children[pid] = Child(order["rank"], order["generation"])

    def _become_rank(self, order: dict[str, Any]) -> None:
        """Close the fork server's files in the forked child, run the rank, and exit. Never returns."""
        code = 1
        try:
            ends_with_parent()
            self._signals.close()
            self._selector.close()
            self._line.connection.close()
            os.setsid()
            from hpc_det.sgd.rank import worker  # loaded already: see PRELOADED

            code = worker.run({**order, "buffers": self._buffers})
        except BaseException:
            traceback.print_exc()
        finally:
            leave(code)

    def _end(self, generation: int) -> None:
        """End all ranks and their descendants, and report each rank as killed; `generation`: that of the answer."""
        end_descendants()  # not only the ranks: their own children, such as loader workers, would survive them
        for child in self._children.values():
            self._line.send({"exited": child.rank, "code": -signal.SIGKILL, "generation": child.generation})
        self._children.clear()
        self._line.send({"ended": generation})

    def _on_child(self) -> None:
        self._signals.received()
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                if child := self._children.pop(pid, None):  # else an orphan: a child of a rank that has exited
                    code = os.waitstatus_to_exitcode(status)
                    self._line.send({"exited": child.rank, "code": code, "generation": child.generation})


def main(argv: list[str]) -> int:
    """Run the fork server: `argv` is [FD, BUFFER...]. Return the exit code."""
    adopt_orphans()
    line = line_over(socket.socket(fileno=int(argv[0])))
    # Imports make no garbage, so the collector is off meanwhile. gc.freeze exempts their objects from collections, in
    # which each rank would traverse them, and so copy the memory pages that it shares with the fork server.
    gc.disable()
    for module in PRELOADED:
        import_module(module)
    gc.freeze()
    gc.enable()
    return ForkServer(line, [int(fd) for fd in argv[1:]]).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
