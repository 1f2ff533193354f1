"""The fork server: a process that has imported modules and forks processes that use them.

    python3 -m hpc_det.node.fork_server FD MODULE... -- MODULE...

It imports the modules and constructs nothing (hpc_det.node.forking). Those after `--` are imported once it has forked
the first process, for the ones that follow; one that cannot be imported is left out. FD is the socket to the process
that has started it, its owner; it exits with that connection.

owner -> fork server: {"fork": KEY, "call": "module:function", "with": ARGUMENT}, {"end": N};
fork server -> owner: {"ready": REASON} once after the imports, where REASON is why forked processes may not work, or
null; the same in answer to "fork", if the modules after `--` are such a reason; {"forked": KEY, "pid": PID},
{"exited": KEY, "code": CODE}, {"ended": N}.

KEY is any value that identifies the process for the owner. `function` takes ARGUMENT and returns the exit code. If
there is a REASON, each process executes a fresh Python, which has none of the modules and the environment in which the
fork server was started.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NoReturn

from hpc_det.node import disk
from hpc_det.node.forking import forked, import_all, leave_with, why_not_to_fork
from hpc_det.node.lines import Line, line_over
from hpc_det.node.process import SignalPipe, adopt_orphans, end_descendants, ends_with_parent, ignore_stop_signals

_CALL = "call"
"""In place of FD: this is a fresh Python, and the next argument is the descriptor of the file with its call."""


@dataclass
class ForkServerProcess:
    """The owner's view of its fork server: the process and the connection to it."""

    process: subprocess.Popen[bytes]
    line: Line

    @classmethod
    def start(
        cls,
        modules: Iterable[str],
        *,
        later: Sequence[str] = (),
        files: Iterable[int] = (),
        environment: Mapping[str, str] | None = None,
        folder: str | None = None,
    ) -> ForkServerProcess:
        """Start a fork server that imports `modules`, and those of `later` once it has forked the first process.

        `files`: descriptors that its processes inherit. `environment`, `folder`: its environment and working
        directory; None: those of this process.
        """
        own, its = socket.socketpair()
        with its:
            process = subprocess.Popen(
                [sys.executable, "-m", "hpc_det.node.fork_server", str(its.fileno()), *modules, "--", *later],
                pass_fds=[its.fileno(), *files],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=_begins,
            )
        return cls(process, line_over(own))

    def fork(self, key: Any, call: str, argument: Any) -> None:
        """Request a process that calls the function `call`, "module:function", with `argument`, a value of JSON."""
        self.line.send({"fork": key, "call": call, "with": argument})


def _begins() -> None:
    ends_with_parent()
    # Slurm may signal every process of a job step, and the owner decides what a stop signal means.
    ignore_stop_signals()


class ForkServer:
    """Forks processes on request of the owner, reports their exits, and ends them."""

    def __init__(self, line: Line, fresh: Mapping[str, str] | None, later: Sequence[str] = ()) -> None:
        """`fresh`: if it is unsafe to fork from this process, the environment of Pythons that are executed instead.

        `later`: modules to import once the first process is forked.
        """
        self._line = line
        self._fresh = fresh
        self._later = later
        self._why_not: str | None = None
        """Why processes that are forked now may not work, because of the modules of `later`; or None."""
        self._children: dict[int, Any] = {}
        """The keys of the processes that were forked and have not exited, by process id."""
        self._signals = SignalPipe([signal.SIGCHLD])
        self._selector = selectors.DefaultSelector()
        self._selector.register(line.connection, selectors.EVENT_READ, self._on_orders)
        self._selector.register(self._signals.fd, selectors.EVENT_READ, self._on_child)
        self._is_over = False

    def run(self) -> int:
        """Serve the owner until its connection ends, then end all descendants. Return the exit code."""
        while not self._is_over:
            for key, _ in self._selector.select():
                key.data()
        end_descendants()
        return 0

    def _on_orders(self) -> None:
        orders = self._line.receive_some()
        self._is_over = orders is None
        for order in orders or []:
            if "fork" in order.head and self._why_not:
                self._line.send({"ready": self._why_not})
            elif "fork" in order.head:
                self._fork(order.head)
                self._import_later()
            else:
                self._end(order.head["end"])

    def _fork(self, order: Mapping[str, Any]) -> None:
        def run() -> int:
            self._signals.close()
            self._selector.close()
            self._line.connection.close()
            call = order["call"], order["with"]
            return _called(*call) if self._fresh is None else _execute(*call, self._fresh)

        pid = forked(run)
        self._children[pid] = order["fork"]
        self._line.send({"forked": order["fork"], "pid": pid})

    def _import_later(self) -> None:
        later, self._later = self._later, ()
        for module in later:
            with suppress(Exception):  # the process that imports it itself reports this
                import_all([module])
        if later:
            self._why_not = why_not_to_fork()

    def _end(self, number: int) -> None:
        """End all processes and their descendants, and report each process as killed; `number`: that of the answer."""
        end_descendants()  # not only the ranks: their own children, such as loader workers, would survive them
        for key in self._children.values():
            self._line.send({"exited": key, "code": -signal.SIGKILL})
        self._children.clear()
        self._line.send({"ended": number})

    def _on_child(self) -> None:
        self._signals.received()
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                if pid in self._children:  # else an orphan: a child of a process that has exited
                    code = os.waitstatus_to_exitcode(status)
                    self._line.send({"exited": self._children.pop(pid), "code": code})


def _called(call: str, argument: Any) -> int:
    """Call the function `call`, "module:function", and return the exit code."""
    module, _, function = call.partition(":")
    return int(getattr(import_module(module), function)(argument))


def _execute(call: str, argument: Any, environment: Mapping[str, str]) -> NoReturn:
    """Replace this process by a fresh Python that makes the call."""
    # Not on the command line, which other users can read, and the argument may contain a key.
    descriptor = os.memfd_create("call", 0)
    disk.write_all(descriptor, json.dumps([call, argument]).encode())
    words = [sys.executable, "-m", "hpc_det.node.fork_server", _CALL, str(descriptor)]
    os.execve(sys.executable, words, environment)


def _executed(descriptor: int) -> int:
    """Make the call that `_execute` has written, and return the exit code."""
    os.lseek(descriptor, 0, os.SEEK_SET)
    with open(descriptor, encoding="utf-8") as file:
        call, argument = json.load(file)
    import_all([call.partition(":")[0]])
    return _called(call, argument)


def main(argv: list[str]) -> int:
    """Run the fork server: `argv` is [FD, MODULE..., "--", MODULE...]. Return the exit code."""
    if argv[0] == _CALL:
        leave_with(lambda: _executed(int(argv[1])))
    adopt_orphans()
    line, environment = line_over(socket.socket(fileno=int(argv[0]))), {**os.environ}
    border = argv.index("--")
    import_all(argv[1:border])
    why = why_not_to_fork()
    line.send({"ready": why})
    return ForkServer(line, environment if why else None, argv[border + 1 :]).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
