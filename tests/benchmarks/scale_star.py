"""The star of a large gang: one process with a connection to each node, measured, and simulated beside a tree.

The connections are real, over loopback; a few forked processes hold their other ends. The simulation places the
measured CPU times on as many nodes as a cluster has, which here share two cores.
"""

from __future__ import annotations

import heapq
import os
import selectors
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from hpc_det.distributed.gang_messages import RankZero
from hpc_det.launch.watch.hang import HangJudge
from hpc_det.launch.watch.peers import Peers, key_of
from hpc_det.node.agent_socket import AgentSocket, say_hello
from hpc_det.node.heartbeat import Progress
from hpc_det.node.lines import Line, connect, connect_local
from hpc_det.node.network import allow_many_files
from tests.benchmarks.table import show

NODES = (512, 1024, 4096)
RANKS_PER_NODE = 8
HOLDERS = 4
"""Processes that hold the other ends of the connections."""
LATENCY_S = 50e-6
"""Assumed time of a message in the network, there and in the simulation's switches."""
WAKE_S = 100e-6
"""Assumed time until a waiting process runs."""
FAN_OUT = 32
"""Children of a node in the simulated tree."""
IDLE_S = 5.0
SECRET = "0" * 32


class Costs(NamedTuple):
    """Seconds of CPU time of node 0's agent, per node."""

    accept_s: float
    """Accept and authenticate a connection, and read the first messages."""
    send_s: float
    """Send a stop."""
    report_s: float
    """Take a report of the heartbeats of a node's ranks."""
    exit_s: float
    """Take the report of an exit, and close the connection."""
    idle: float
    """CPU time per second of waiting."""
    accept_wall_s: float
    """Seconds until all nodes had connected here."""
    known_s: float
    """Seconds from the first byte of a stop until all nodes had read it here."""
    kb: float
    """Memory of a connection in kB."""


def main() -> None:
    rows = []
    for nodes in NODES:
        cost = measured(nodes)
        rows.append(
            [
                f"{nodes:,}",
                f"{1e6 * cost.accept_s:.0f}",
                f"{cost.accept_s * nodes:.2f}",
                f"{1e6 * cost.send_s:.0f}",
                f"{1000 * cost.send_s * nodes:.0f}",
                f"{1000 * cost.known_s:.0f}",
                f"{1e6 * cost.report_s:.0f}",
                f"{1e6 * cost.idle / nodes:.2f}",
                f"{cost.kb:.0f}",
            ]
        )
    show(
        f"Node 0's agent with one connection per node, in {HOLDERS} processes of this machine",
        (
            "nodes",
            "CPU per accepted connection [us]",
            "all connections [s]",
            "CPU per stop sent [us]",
            "all stops [ms]",
            "last one read here after [ms]",
            f"CPU per report of {RANKS_PER_NODE} heartbeats [us]",
            "CPU per idle connection and second [us]",
            "memory per connection [kB]",
        ),
        rows,
    )
    ranks = NODES[-1] * RANKS_PER_NODE
    show(
        f"Loops over {ranks:,} ranks",
        ("loop", "once [ms]"),
        [
            ("hang detection on node 0, ranks train", f"{1000 * _judged('training', ranks):.0f}"),
            ("hang detection on node 0, ranks in setup", f"{1000 * _judged('setup', ranks):.0f}"),
            ("rank 0 receives a report of each rank in a save", f"{1000 * gathered_s(ranks):.0f}"),
        ],
    )


@cache
def measured(nodes: int) -> Costs:
    """Measure the costs with this number of nodes."""
    allow_many_files()
    with selectors.DefaultSelector() as selector:
        peers = Peers(selector, "127.0.0.1", nodes + 1)
        peers.secret = SECRET
        counts = {"reports": 0, "hellos": 0}

        def take(node: int, message: dict[str, object]) -> None:
            counts["reports"] += "ranks" in message
            counts["hellos"] += "problems" in message

        peers.on_message = take
        memory_kb = _rss_kb()
        with _holders(nodes, peers.port) as pipes:

            def serve(until: Callable[[], bool]) -> tuple[float, float]:
                """Return the CPU time of this process per node, and the seconds, until the condition is true."""
                cpu, wall = time.process_time(), time.monotonic()
                while not until():
                    if selector.select(1.0):
                        peers.poll()
                return (time.process_time() - cpu) / nodes, time.monotonic() - wall

            _order(pipes, "connect")
            accept_s, accept_wall_s = serve(lambda: counts["hellos"] == nodes)
            memory_kb = _rss_kb() - memory_kb
            _answers(pipes)
            cpu = time.process_time()
            idle_until = time.monotonic() + IDLE_S
            serve(lambda: time.monotonic() > idle_until)
            idle = (time.process_time() - cpu) / IDLE_S
            _order(pipes, "stop")
            began, cpu = time.monotonic(), time.process_time()
            peers.tell({"stop": "signal", "deadline": None})
            send_s = (time.process_time() - cpu) / nodes
            known_s = max(map(float, _answers(pipes))) - began
            _order(pipes, "report")
            report_s, _ = serve(lambda: counts["reports"] == nodes)
            _answers(pipes)
            _order(pipes, "exit")
            exit_s, _ = serve(lambda: not peers.present)
        peers.close()
    return Costs(accept_s, send_s, report_s, exit_s, idle, accept_wall_s, known_s, memory_kb / nodes)


@contextmanager
def _holders(nodes: int, port: int) -> Iterator[list[socket.socket]]:
    """Fork the processes that hold the other ends, and end them after the block."""
    ours, pids = [], []
    for holder in range(HOLDERS):
        mine, its = socket.socketpair()
        if not (pid := os.fork()):
            with suppress(BaseException):
                _hold(its, port, range(1 + holder, nodes + 1, HOLDERS))
            os._exit(0)
        its.close()
        ours.append(mine)
        pids.append(pid)
    try:
        yield ours
    finally:
        _order(ours, "end")  # not by closing: later holders have copies of the sockets of earlier ones
        for mine, pid in zip(ours, pids, strict=True):
            mine.close()
            os.waitpid(pid, 0)


def _hold(orders: socket.socket, port: int, nodes: range) -> None:
    """Be the agents of these nodes."""
    lines: list[Line] = []
    report = [{"heartbeat": rank, **Progress("training", 7, warm=True, batch=7)._asdict()} for rank in range(8)]
    while (order := orders.recv(100)) != b"end":
        if order == b"connect":
            for node in nodes:
                identity = {"role": "agent", "node": node}
                lines.append(connect("127.0.0.1", port, key_of(SECRET), identity, 60.0))
                lines[-1].send({"hello": True})
                lines[-1].send({"time": time.time(), "problems": []})
        elif order == b"stop":
            for line in lines:
                line.receive()
        for line in lines:
            if order == b"report":
                line.send({"ranks": report})
            elif order == b"exit":
                line.send({"exit": 0})
        orders.send(str(time.monotonic()).encode())


def _order(pipes: list[socket.socket], order: str) -> None:
    for pipe in pipes:
        pipe.send(order.encode())


def _answers(pipes: list[socket.socket]) -> list[bytes]:
    return [pipe.recv(100) for pipe in pipes]


def _rss_kb() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def _judged(phase: Literal["training", "setup"], ranks: int) -> float:
    """Return the seconds of one check for a hang, of ranks that are all in the same place."""
    judge = HangJudge(ranks, None)
    for rank in range(ranks):
        judge.take(rank, Progress(phase, 7, warm=phase == "training"))
    began = time.process_time()
    judge.is_hung(1.0)
    judge.is_hung(1e9)
    return (time.process_time() - began) / 2


def gathered_s(ranks: int) -> float:
    """Return the seconds in which rank 0 takes the messages of all ranks and returns them, without the network."""
    messages = RankZero(ranks, "127.0.0.1", b"key")
    began = time.process_time()
    for rank in range(ranks):
        messages._take("files", rank, ["uuid", {}])
    messages.from_all("files", "reported", limit_s=10.0, is_it=lambda report: report[0] == "uuid")
    taken_s = time.process_time() - began
    messages.close()
    return taken_s


@cache
def rank_send_s() -> float:
    """Return the CPU seconds in which an agent passes a stop to one of its ranks."""
    with tempfile.TemporaryDirectory() as folder, selectors.DefaultSelector() as selector:
        agent = AgentSocket(f"{folder}/agent", selector)
        lines = [connect_local(f"{folder}/agent") for _ in range(RANKS_PER_NODE)]
        for rank, line in enumerate(lines):
            say_hello(line, rank, os.getpid())
        while len(agent.ranks) < RANKS_PER_NODE:
            agent.turn()
        taken = []
        for _ in range(100):
            agent._stop = None
            began = time.process_time()
            agent.send_stop("signal")
            taken.append(time.process_time() - began)
        for line in lines:
            line.close()
        agent.close()
    return statistics.median(taken) / RANKS_PER_NODE


# --- simulation


def simulation() -> None:
    """Show when the last rank has a stop, from the moment at which node 0's agent knows of it."""
    cost, to_rank_s = measured(NODES[-1]), rank_send_s()
    rows = []
    for nodes in (64, *NODES, 16384):
        took = {fan_out: max(known(nodes, fan_out, cost.send_s, to_rank_s)) for fan_out in (nodes, FAN_OUT)}
        rows.append(
            [
                f"{nodes:,}",
                f"{nodes * RANKS_PER_NODE:,}",
                f"{1000 * took[nodes]:.0f}",
                f"{1000 * took[FAN_OUT]:.0f}",
                f"{cost.accept_s * nodes:.2f}",
                f"{cost.exit_s * nodes:.2f}",
                f"{100 * cost.report_s * nodes / 30:.1f}",
            ]
        )
    show(
        f"Simulation: {1e6 * cost.send_s:.0f} us per message to a node, {1e6 * to_rank_s:.0f} us per message to a "
        f"rank, {1e6 * LATENCY_S:.0f} us network, {1e6 * WAKE_S:.0f} us until a process runs",
        (
            "nodes",
            "ranks",
            "a stop is known everywhere, star [ms]",
            f"tree of {FAN_OUT} [ms]",
            "all connected [s]",
            "all exits reported [s]",
            "node 0's core for heartbeats each 30 s [%]",
        ),
        rows,
    )


def known(nodes: int, fan_out: int, send_s: float, to_rank_s: float) -> list[float]:
    """Return the times at which the nodes have passed a stop to their last rank; node 0 knows at 0.

    Each node sends to its children in the tree, one after another, then to its ranks. The children of node n are
    n * fan_out + 1 to n * fan_out + fan_out, so a tree with a fan-out of all nodes is a star.
    """
    done = []
    due = [(0.0, 0)]
    while due:
        now, node = heapq.heappop(due)
        for child in range(node * fan_out + 1, min(node * fan_out + fan_out + 1, nodes)):
            now += send_s
            heapq.heappush(due, (now + LATENCY_S + WAKE_S, child))
        done.append(now + RANKS_PER_NODE * to_rank_s + WAKE_S)
    return done
