"""A process of each node that has imported torch, and that ranks are forked from: a gang stands again in 0.1 s.

    python3 -m hpc_det.sgd.rank.fork_server FD BUFFER...

It never touches a GPU nor starts a thread, so each rank begins as clean as a fresh interpreter. FD is its line to the
node agent: {"fork": order}, {"end": generation}; it answers {"exited": rank, "code", "generation"},
{"ended": generation}.
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

PRELOADED = (
    "hpc_det.sgd.rank.worker",
    "torch._dynamo",  # which optimizers and DistributedDataParallel load at their first step
)


class Child(NamedTuple):
    rank: int
    generation: int


class ForkServer:
    """Forks ranks as the node agent orders, reports their exits, and ends them."""

    def __init__(self, line: Line, buffers: list[int]) -> None:
        self._line = line
        self._buffers = buffers
        self._children: dict[int, Child] = {}
        self._signals = SignalPipe([signal.SIGCHLD])
        self._selector = selectors.DefaultSelector()
        self._selector.register(line.connection, selectors.EVENT_READ, self._on_orders)
        self._selector.register(self._signals.fd, selectors.EVENT_READ, self._on_child)
        self._is_over = False

    def run(self) -> int:
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
        """In the child: nothing of the fork server may be left, and nothing of it may return there."""
        code = 1
        try:
            ends_with_parent()
            self._signals.close()
            self._selector.close()
            self._line.connection.close()
            os.setsid()
            from hpc_det.sgd.rank import worker

            code = worker.run({**order, "buffers": self._buffers})
        except BaseException:
            traceback.print_exc()
        finally:
            leave(code)

    def _end(self, generation: int) -> None:
        """All ranks and all that they have started; a rank's own children would outlive it otherwise."""
        end_descendants()
        for child in self._children.values():
            self._line.send({"exited": child.rank, "code": -signal.SIGKILL, "generation": child.generation})
        self._children.clear()
        self._line.send({"ended": generation})

    def _on_child(self) -> None:
        self._signals.received()
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                if child := self._children.pop(pid, None):  # else a child of a rank that is gone
                    code = os.waitstatus_to_exitcode(status)
                    self._line.send({"exited": child.rank, "code": code, "generation": child.generation})


def main(argv: list[str]) -> int:
    adopt_orphans()
    line = line_over(socket.socket(fileno=int(argv[0])))
    # What an import makes stays: to look through it for garbage would take long, in each rank again.
    gc.disable()
    for module in PRELOADED:
        import_module(module)
    gc.freeze()
    gc.enable()
    return ForkServer(line, [int(fd) for fd in argv[1:]]).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
