"""The node agent of a driver: it keeps running while gangs of ranks are formed and ended.

    python3 -m hpc_det.sgd.elastic.node RUN_FOLDER SLOTS

It connects to the driver and executes the driver's requests: fork ranks, end ranks, hold snapshots. It reports stop
signals to the driver, which then starts no new ranks on the node; the signals themselves end nothing. If the driver is
lost, the agent ends all ranks, writes the newest snapshot to disk if it is that snapshot's writer (or removes the run
if that is temporary), and exits. If it cannot connect, it writes the reason to the run (hpc_det.sgd.elastic.check_in)
and fails. If a scheduler suspends its job, its ranks are suspended and continued with it.

One child, the fork server (hpc_det.node.fork_server), imports torch, and the ranks are forked from it, or executed
where that is unsafe. The agent owns the memory of the snapshots, so that a snapshot survives the death of a rank; the
memory is freed when the agent exits.

driver -> agent: {"do": "fork", "generation", "size", "ranks": [[rank, local rank], ...]}, {"do": "end", "generation"},
{"do": "hold", "number", "buffer", "progress", "own": SIZES, "is_writer", "keep"} with the ranks' own parts, {"do":
"leave"}; agent -> driver: {"beat": n} every BEAT_S, {"exited": rank, "code", "generation"}, {"ended": generation},
{"leaving": SIGNAL}, {"kept": number}, with "error" if the snapshot could not be written.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, MutableMapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from hpc_det.checkpoint.snapshots import BUFFERS, Buffer, Held, Keeper
from hpc_det.errors import HpcDetError
from hpc_det.node.fork_server import ForkServerProcess
from hpc_det.node.frames import Message
from hpc_det.node.key import derived
from hpc_det.node.lines import Line
from hpc_det.node.network import limit_look_ups, own_address
from hpc_det.node.process import STOP_SIGNALS, SignalPipe, adopt_orphans, end_descendants
from hpc_det.node.suspension import guarded
from hpc_det.schedulers.pbs.scheduler import Pbs
from hpc_det.schedulers.slurm.scheduler import Slurm
from hpc_det.sgd.elastic.meeting import call_driver, is_abandoned
from hpc_det.store.run_folder import RunFolder

BEAT_S, END_S = 1.0, 1.0
"""Seconds between two heartbeats, and seconds that a fork server may take to exit."""
DEATH_LOOKS, POLL_S = 40, 0.05
"""Number of checks, and seconds between them, whether the driver's process has ended after its connection has: a killed
process closes its connections before it ends. Checks are counted instead of seconds, because time also passes while all
processes are suspended.
"""
MEET_S = 60.0
"""Seconds to wait for the driver; it writes its address before it starts agents."""


PRELOADED = (
    "hpc_det.sgd.rank.worker",
    "torch._dynamo",  # optimizers and DistributedDataParallel import it at their first step
)
"""Modules that the fork server imports, so that the ranks share their memory and need not import them."""


class NodeAgent:
    """The agent of one node: executes the driver's requests until it is asked to exit or loses the driver."""

    def __init__(self, run: RunFolder, slots: int) -> None:
        self._run = run
        self._slots = slots
        self._selector = selectors.DefaultSelector()
        self._signals = SignalPipe((*STOP_SIGNALS, signal.SIGCHLD))
        self._selector.register(self._signals.fd, selectors.EVENT_READ, self._on_signals)
        self._buffers = [Buffer(number) for number in range(BUFFERS)]
        self._files = [buffer.descriptor for buffer in self._buffers]
        self._held: Held | None = None
        """The newest complete snapshot in the buffers of this node."""
        self._is_writer = False
        """Whether this agent has to write that snapshot to disk."""
        self._keeper = Keeper(run, lambda message: self._driver.send(message))
        self._parent = os.getppid()
        self._is_over = self._is_alone = False
        """Whether the agent is to exit; and whether it is because it has lost its driver or its parent, and not because
        the driver has requested it.
        """
        self._fork_server: ForkServerProcess | None = None
        self._forked: dict[str, Any] = {}
        """The last "fork" request."""
        self._start_fork_server()  # it imports torch while the agent connects to the driver

    def run(self) -> int:
        """Execute requests until the driver asks the agent to exit or is lost; return the exit code.

        Raises HpcDetError if it finds no driver.
        """
        host = socket.gethostname()
        identity = {"role": "node", "host": host, "job": own_job(os.environ), "pid": os.getpid(), "slots": self._slots}
        try:
            self._driver = call_driver(self._run, f"{host}-{os.getpid()}", identity, MEET_S, self._lacks_its_driver)
        except HpcDetError:
            self._is_alone = self._lacks_its_driver()
            self._remove_abandoned()
            raise
        orders = _Orders(self._driver)
        self._selector.register(orders.fd, selectors.EVENT_READ, lambda: self._obey_all(orders))
        next_beat = 0.0
        while not self._is_over:
            for key, _ in self._selector.select(timeout=max(0.0, next_beat - time.monotonic())):
                key.data()
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + BEAT_S
                self._driver.send({"beat": 1})
                if self._has_no_parent():
                    self._is_over = self._is_alone = True
        end_descendants()
        if not self._remove_abandoned():
            self._keeper.settle(self._held if self._is_writer else None)
        self._driver.close()
        orders.join()
        return 0

    def _has_no_parent(self) -> bool:
        """Return whether the process that started this agent has exited."""
        return os.getppid() != self._parent

    def _lacks_its_driver(self) -> bool:
        """Return whether no driver will come: its process, or the one that started this agent, has exited."""
        # The driver of a temporary run, which may have been killed before this process had read its parent's id.
        return self._has_no_parent() or (self._run.temporary.exists() and is_abandoned(self._run))

    def _obey_all(self, orders: _Orders) -> None:
        """Execute the requests that have arrived, up to the first one after which the agent exits."""
        for order in orders.taken():
            if self._is_over:
                return
            if order is None or order.head["do"] == "leave":
                self._is_over, self._is_alone = True, order is None
            else:
                getattr(self, f"_{order.head['do']}")(order)

    def _fork(self, order: Message) -> None:
        """Fork the ranks of a new generation, with a new fork server if the last one has exited."""
        head = self._forked = order.head
        if self._fork_server is None:
            self._start_fork_server()
        assert self._fork_server
        generation, (host, port) = head["generation"], self._driver.connection.getpeername()
        key = derived(self._run.key(), f"generation {generation}")
        common = {
            "driver": [host, port],
            "key": key.hex(),
            "generation": generation,
            "size": head["size"],
            # A driver on a loopback address has all its ranks on this machine, which need no network interface.
            "interface": own_address(1 if host == "127.0.0.1" else 2, None)[1],
            "buffers": self._files,
        }
        for rank, local_rank in head["ranks"]:
            log = str(self._run.rank_log(generation, rank))
            argument = {**common, "rank": rank, "local_rank": local_rank, "log": log}
            self._fork_server.fork({"exited": rank, "generation": generation}, "hpc_det.sgd.rank.worker:run", argument)

    def _end(self, order: Message) -> None:
        """End all ranks; the fork server reports when they have ended. Without one no rank is left."""
        if self._fork_server:
            self._fork_server.line.send({"end": order.head["generation"]})
        else:
            self._driver.send({"ended": order.head["generation"]})

    def _hold(self, order: Message) -> None:
        """Take this snapshot, which is complete now, as the newest one, and begin to write it to disk if requested."""
        self._held = Held.of(order, self._buffers)
        self._is_writer = order.head["is_writer"]
        if order.head["keep"]:
            self._keeper.begin(self._held)

    def _remove_abandoned(self) -> bool:
        """Remove the run if it is temporary and its driver was killed, so that no program can continue it.

        Return whether it was removed.
        """
        for _ in range(DEATH_LOOKS):
            if not (self._is_alone and self._run.temporary.exists()):
                break
            if is_abandoned(self._run):
                shutil.rmtree(self._run.path, ignore_errors=True)
                return True
            time.sleep(POLL_S)
        return False

    def _start_fork_server(self) -> None:
        self._fork_server = ForkServerProcess.start(PRELOADED, files=self._files)
        self._selector.register(self._fork_server.line.connection, selectors.EVENT_READ, self._on_fork_server)

    def _on_fork_server(self) -> None:
        assert self._fork_server
        messages = self._fork_server.line.receive_some()
        if messages is None:
            self._lose_fork_server(self._fork_server)
        for message in messages or []:
            self._take(message.head)

    def _take(self, message: dict[str, Any]) -> None:
        """Handle a message of the fork server."""
        if "exited" in message:
            self._driver.send({**message["exited"], "code": message["code"]})
        elif "ended" in message:
            self._driver.send(message)
        elif message.get("ready"):
            why = message["ready"]
            print(f"hpc-det: note: each rank imports torch separately: {why}", file=sys.stderr, flush=True)

    def _lose_fork_server(self, lost: ForkServerProcess) -> None:
        """Clean up after a fork server that has failed, and report its ranks as exited."""
        # Also ranks that it had still to fork: no other message would report them.
        self._selector.unregister(lost.line.connection)
        lost.line.connection.close()
        code = _code_of(lost.process)
        end_descendants()
        self._fork_server = None
        generation = self._forked.get("generation")
        for rank, _ in self._forked.get("ranks", []):
            self._driver.send({"exited": rank, "code": code, "generation": generation})
        self._driver.send({"ended": generation})

    def _on_signals(self) -> None:
        for number in self._signals.received():
            if number in STOP_SIGNALS:
                print(f"{number.name} received: reporting to the driver that this node will be taken away", flush=True)
                self._driver.send({"leaving": number.name})


def _code_of(process: subprocess.Popen[bytes]) -> int:
    """Return the exit code of a process that is about to exit; kill it if it has not exited after END_S seconds."""
    with suppress(subprocess.TimeoutExpired):
        return process.wait(END_S)
    process.kill()
    return process.wait()


class _Orders:
    """The driver's requests, read by a separate thread: they are received even while the main thread is busy."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._messages: deque[Message | None] = deque()
        self.fd, self._bell = os.pipe()  # wakes the selector of the main thread
        self._thread = threading.Thread(target=self._read, name="orders")
        self._thread.start()

    def taken(self) -> list[Message | None]:
        """Return the requests that have arrived; None among them is the end of the connection."""
        os.read(self.fd, 4096)
        return [self._messages.popleft() for _ in range(len(self._messages))]

    def join(self) -> None:
        """Wait for the end of the thread."""
        self._thread.join()

    def _read(self) -> None:
        message: Any = True
        while message is not None:
            message = self._line.receive()
            self._messages.append(message)
            os.write(self._bell, b"!")


def share_cpus(slots: int, environment: MutableMapping[str, str]) -> None:
    """Set OMP_NUM_THREADS to each slot's share of the CPUs, unless it is set."""
    # By default each rank starts one thread per CPU, and the threads of all ranks compete for the CPUs.
    environment.setdefault("OMP_NUM_THREADS", str(max(len(os.sched_getaffinity(0)) // slots, 1)))


def own_job(env: Mapping[str, str]) -> str | None:
    """Return the id of the job that this process is in, as the scheduler's commands take it; None outside of a job."""
    if "SLURM_JOB_ID" in env:
        return Slurm().job_id(env)
    return Pbs().job_id(env) if "PBS_JOBID" in env else None


def main(argv: list[str]) -> int:
    """Run a node agent: `argv` is [RUN_FOLDER, SLOTS]. Return the exit code, which is 0 if it has had a driver."""
    adopt_orphans()
    limit_look_ups(os.environ)
    run, slots = RunFolder(Path(argv[0])), int(argv[1])
    share_cpus(slots, os.environ)
    with guarded() if own_job(os.environ) else nullcontext():
        agent = NodeAgent(run, slots)
        try:
            return agent.run()
        except HpcDetError as error:  # it has no driver
            print(error, file=sys.stderr, flush=True)
            end_descendants()
            return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
