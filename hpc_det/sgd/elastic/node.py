"""The node agent of a driver: it stays while gangs of ranks come and go.

    python3 -m hpc_det.sgd.elastic.node RUN_FOLDER SLOTS

It says hello to the driver, and does what it is told on its line: fork ranks, end them, keep snapshots. Stop signals
are news for the driver, which drains the node; they end nothing here. Without its driver it ends all ranks, makes the
newest snapshot that it holds durable, or removes a run that is temporary, and leaves. In a scheduler's job its ranks
stop and continue with it.

Torch is loaded by one child, the fork server (hpc_det.sgd.rank.fork_server), and the ranks are forked from that. The
memory that snapshots are written to belongs to the agent: no rank that dies takes it along, and nothing of it outlives
the agent.

driver -> agent: {"do": "fork", "generation", "size", "ranks": [[rank, local rank], ...]}, {"do": "end", "generation"},
{"do": "hold", "number", "buffer", "progress", "own": SIZES, "is_writer", "keep"} with the ranks' own parts, {"do":
"leave"}; agent -> driver: {"beat": n} every BEAT_S, {"exited": rank, "code", "generation"}, {"ended": generation},
{"leaving": SIGNAL}, {"kept": number}, with "error" if it was not.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_det.checkpoint.snapshots import BUFFERS, Buffer, Held, Keeper
from hpc_det.node.frames import Message
from hpc_det.node.key import derived
from hpc_det.node.lines import Line, line_over
from hpc_det.node.network import limit_look_ups, own_address
from hpc_det.node.process import STOP_SIGNALS, SignalPipe, adopt_orphans, end_descendants, ends_with_parent
from hpc_det.node.suspension import guarded
from hpc_det.schedulers.pbs.scheduler import Pbs
from hpc_det.schedulers.slurm.scheduler import Slurm
from hpc_det.sgd.elastic.meeting import call_driver, is_abandoned
from hpc_det.store.run_folder import RunFolder

BEAT_S, END_S = 1.0, 1.0
DEATH_LOOKS, POLL_S = 40, 0.05
"""A driver that is killed has hung up before it has ended. Looks are counted, and no time in which all stand still."""
MEET_S = 60.0
"""How long the driver is looked for: it announces itself before it starts agents."""


@dataclass
class ForkServerProcess:
    """The agent's end of the process that ranks are forked from."""

    process: subprocess.Popen[bytes]
    line: Line

    @classmethod
    def start(cls, buffers: list[int]) -> ForkServerProcess:
        own, its = socket.socketpair()
        with its:
            process = subprocess.Popen(
                [sys.executable, "-m", "hpc_det.sgd.rank.fork_server", str(its.fileno()), *map(str, buffers)],
                pass_fds=[its.fileno(), *buffers],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=ends_with_parent,
            )
        return cls(process, line_over(own))


class NodeAgent:
    def __init__(self, run: RunFolder, slots: int) -> None:
        self._run = run
        self._slots = slots
        self._selector = selectors.DefaultSelector()
        self._signals = SignalPipe((*STOP_SIGNALS, signal.SIGCHLD))
        self._selector.register(self._signals.fd, selectors.EVENT_READ, self._on_signals)
        self._buffers = [Buffer(number) for number in range(BUFFERS)]
        self._held: Held | None = None
        self._is_writer = False
        self._keeper = Keeper(run, lambda message: self._driver.send(message))
        self._parent = os.getppid()
        self._is_over = self._is_alone = False
        """Alone: it was not told to leave."""
        self._fork_server: ForkServerProcess | None = None
        self._forked: dict[str, Any] = {}
        """The last order to do so."""
        self._start_fork_server()  # torch loads while the driver is met

    def run(self) -> int:
        """Until the driver says so, or is gone."""
        host = socket.gethostname()
        identity = {"role": "node", "host": host, "job": own_job(os.environ), "pid": os.getpid(), "slots": self._slots}
        self._driver = call_driver(self._run, f"{host}-{os.getpid()}", identity, MEET_S)
        orders = _Orders(self._driver)
        self._selector.register(orders.fd, selectors.EVENT_READ, lambda: self._obey_all(orders))
        next_beat = 0.0
        while not self._is_over:
            for key, _ in self._selector.select(timeout=max(0.0, next_beat - time.monotonic())):
                key.data()
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + BEAT_S
                self._driver.send({"beat": 1})
                if os.getppid() != self._parent:  # whoever started this agent is gone
                    self._is_over = self._is_alone = True
        end_descendants()
        if not self._remove_abandoned():
            self._keeper.settle(self._held if self._is_writer else None)
        self._driver.close()
        orders.join()
        return 0

    def _obey_all(self, orders: _Orders) -> None:
        for order in orders.taken():
            if self._is_over:
                return
            if order is None or order.head["do"] == "leave":
                self._is_over, self._is_alone = True, order is None
            else:
                getattr(self, f"_{order.head['do']}")(order)

    def _fork(self, order: Message) -> None:
        """A fork server that is gone is replaced."""
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
            "interface": own_address(1 if host == "127.0.0.1" else 2, None)[1],
        }
        for rank, local_rank in head["ranks"]:
            log = str(self._run.rank_log(generation, rank))
            self._fork_server.line.send({"fork": {**common, "rank": rank, "local_rank": local_rank, "log": log}})

    def _end(self, order: Message) -> None:
        if self._fork_server:
            self._fork_server.line.send({"end": order.head["generation"]})
        else:
            self._driver.send({"ended": order.head["generation"]})

    def _hold(self, order: Message) -> None:
        """This snapshot is whole now. The memory of those before it may be written to again."""
        self._held = Held.of(order, self._buffers)
        self._is_writer = order.head["is_writer"]
        if order.head["keep"]:
            self._keeper.begin(self._held)

    def _remove_abandoned(self) -> bool:
        """A temporary run whose driver was killed, which nobody can go on with; whether it was one."""
        for _ in range(DEATH_LOOKS):
            if not (self._is_alone and self._run.temporary.exists()):
                break
            if is_abandoned(self._run):
                shutil.rmtree(self._run.path, ignore_errors=True)
                return True
            time.sleep(POLL_S)
        return False

    def _start_fork_server(self) -> None:
        self._fork_server = ForkServerProcess.start([buffer.descriptor for buffer in self._buffers])
        self._selector.register(self._fork_server.line.connection, selectors.EVENT_READ, self._on_fork_server)

    def _on_fork_server(self) -> None:
        assert self._fork_server
        messages = self._fork_server.line.receive_some()
        if messages is None:
            self._lose_fork_server(self._fork_server)
        for message in messages or []:
            self._driver.send(message.head)

    def _lose_fork_server(self, lost: ForkServerProcess) -> None:
        """It has failed, and its ranks with it. Nobody else tells of those that it was still to fork."""
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
                print(f"{number.name}: the driver is told that this node leaves", flush=True)
                self._driver.send({"leaving": number.name})


def _code_of(process: subprocess.Popen[bytes]) -> int:
    """Of one that ends, or it is killed."""
    with suppress(subprocess.TimeoutExpired):
        return process.wait(END_S)
    process.kill()
    return process.wait()


class _Orders:
    """What the driver says, read by a thread: its end has to be heard while a snapshot is being sent."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._messages: deque[Message | None] = deque()
        self.fd, self._bell = os.pipe()
        self._thread = threading.Thread(target=self._read, name="orders")
        self._thread.start()

    def taken(self) -> list[Message | None]:
        os.read(self.fd, 4096)
        return [self._messages.popleft() for _ in range(len(self._messages))]

    def join(self) -> None:
        self._thread.join()

    def _read(self) -> None:
        message: Any = True
        while message is not None:
            message = self._line.receive()
            self._messages.append(message)
            os.write(self._bell, b"!")


def share_cpus(slots: int, environment: MutableMapping[str, str]) -> None:
    """Each rank would start as many threads as there are CPUs, and all of them wait for each other."""
    environment.setdefault("OMP_NUM_THREADS", str(max(len(os.sched_getaffinity(0)) // slots, 1)))


def own_job(env: Mapping[str, str]) -> str | None:
    """The id by which the scheduler's commands know the job that this process is in."""
    if "SLURM_JOB_ID" in env:
        return Slurm().job_id(env)
    return Pbs().job_id(env) if "PBS_JOBID" in env else None


def main(argv: list[str]) -> int:
    adopt_orphans()
    limit_look_ups(os.environ)
    run, slots = RunFolder(Path(argv[0])), int(argv[1])
    share_cpus(slots, os.environ)
    with guarded() if own_job(os.environ) else nullcontext():
        return NodeAgent(run, slots).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
