"""Events of a gang of many real agents on this machine: start, stop, next attempt, a lost node, end.

The agents have no ranks: their entrypoint is a shell that reads a pipe. All agents share the cores of this machine, so
times until all nodes know are limited by the CPU time of all agents together; on a cluster by that of the job's process
and of node 0's agent, which the table shows, too.
"""

from __future__ import annotations

import os
import selectors
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from hpc_det.launch.job.agents import Agents
from hpc_det.launch.orders import Order
from hpc_det.node.frames import Unsealed
from hpc_det.node.lines import Line
from hpc_det.node.process import adopt_orphans
from hpc_det.store.attempt import request_stop
from tests.benchmarks.scale_agents import (
    BYTES,
    ENDED,
    FILES,
    FOLDER,
    KNOWS,
    LOGS,
    MESSAGES,
    NODES,
    PID,
    STOPPED,
    TABLE,
    Table,
)
from tests.benchmarks.table import show
from tests.launch.gang import Gang

AGENTS = int(os.environ.get("SCALE_AGENTS", 512))
RANKS_PER_NODE = 8
IDLE_S = 10.0
LIMIT_S = 300.0
"""Seconds for one event."""
HEADER = (
    "event",
    "until all know [s]",
    "messages of the job",
    "of node 0",
    "of another node",
    "file operations of node 0",
    "of another node",
    "looks at logs of another node",
    "CPU of the job [ms]",
    "of node 0 [ms]",
    "of another node [ms]",
)


@dataclass
class Counters:
    """Numbers of all agents and of the job at one moment."""

    messages: list[float]
    files: list[float]
    logs: list[float]
    cpu_s: list[float]
    """CPU time of each agent's process, without its children."""
    job_messages: int
    job_cpu_s: float


@dataclass
class Measured:
    """The job's end, which measures itself, and the agents' table."""

    agents: Agents
    table: Table
    selector: selectors.BaseSelector
    job_cpu_s: float = 0.0
    job_messages: list[int] = field(default_factory=lambda: [0])
    rows: list[list[str]] = field(default_factory=list)

    @contextmanager
    def event(self, name: str, known: Callable[[], list[float]] | None = None) -> Iterator[None]:
        """Measure the block. `known`: the times at which the agents learned of the event, after the block."""
        before, began = self._now(), time.monotonic()
        yield
        took = f"{max(known()) - began:.2f}" if known else ""
        self.rows.append([name, took, *_differences(before, self._now())])
        print("; ".join(self.rows[-1]), f"({time.monotonic() - began:.1f} s)", file=sys.stderr, flush=True)

    def do(self, call: Callable[[], None]) -> None:
        """Do something as the job, and count its CPU time."""
        began = time.thread_time()
        call()
        self.job_cpu_s += time.thread_time() - began

    def until(self, condition: Callable[[], bool]) -> None:
        """Serve the agents until the condition is true."""
        end = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < end, self.table.column(KNOWS).count(0.0)
            if self.selector.select(0.05):
                self.do(self.agents.turn)

    def all_have(self, column: int, nodes: int) -> bool:
        return sum(map(bool, self.table.column(column))) >= nodes

    def pid(self, node: int) -> int:
        return int(self.table.column(PID)[node])

    def _now(self) -> Counters:
        cpu_s = [_cpu_s(int(pid)) for pid in self.table.column(PID)]
        messages, files, logs = (self.table.column(column) for column in (MESSAGES, FILES, LOGS))
        return Counters(messages, files, logs, cpu_s, self.job_messages[0], self.job_cpu_s)


def main() -> None:
    adopt_orphans()
    with _measured() as (gang, measured, pipe):
        agents, table = measured.agents, measured.table
        first, second = (Order(trial=str(gang.trial.path), attempt=number, worker=0) for number in (1, 2))

        with measured.event("start"):
            measured.do(lambda: agents.begin(first))
            measured.until(lambda: measured.all_have(KNOWS, AGENTS) and gang.trial.nodes(1).exists())
        pss_mb = statistics.median(_pss_mb(measured.pid(node)) for node in range(1, AGENTS, max(AGENTS // 16, 1)))
        time.sleep(2)
        with measured.event(f"{IDLE_S:g} s without an event"):
            end = time.monotonic() + IDLE_S
            measured.until(lambda: time.monotonic() > end)
        with measured.event("stop request in the run folder", lambda: table.column(STOPPED)):
            request_stop(gang.trial.stop, attempt=1, reason="pause", source="a benchmark")
            measured.until(lambda: measured.all_have(STOPPED, AGENTS))
        with measured.event("end of the attempt"):
            _end_entrypoints(pipe)
            measured.until(lambda: agents.have_ended)
        table.clear(KNOWS, STOPPED, ENDED)
        with measured.event("next attempt, same agents", lambda: table.column(KNOWS)):
            measured.do(lambda: agents.begin(second))
            measured.until(lambda: measured.all_have(KNOWS, AGENTS) and gang.trial.nodes(2).exists())
        time.sleep(2)
        with measured.event("a lost node", lambda: table.column(ENDED)):
            os.kill(measured.pid(AGENTS // 2), signal.SIGKILL)
            measured.until(lambda: measured.all_have(ENDED, AGENTS - 1))
        measured.until(lambda: agents.have_ended)
        show(f"{AGENTS} agents on this machine; an agent has {pss_mb:.0f} MB (PSS)", HEADER, measured.rows)
        print(f"\nbytes sent by a node other than 0: {statistics.mean(table.column(BYTES)[1:]):.0f} in all")


@contextmanager
def _measured() -> Iterator[tuple[Gang, Measured, Path]]:
    with (
        tempfile.TemporaryDirectory() as state,
        tempfile.TemporaryDirectory(prefix="s-") as tmp,
        selectors.DefaultSelector() as selector,
    ):
        gang, pipe = Gang(Path(state), Path(tmp)), Path(tmp) / "pipe"
        os.mkfifo(pipe)
        plan = gang.plan(
            f"read line < {pipe}; exit 0",
            scheduler="slurm",
            nodes=AGENTS,
            job_nodes=AGENTS,
            ranks_per_node=RANKS_PER_NODE,
            job_slots_per_node=RANKS_PER_NODE,
            network_interface="lo",
        )
        table = Table.create(f"{tmp}/table", AGENTS)
        os.environ |= {TABLE: f"{tmp}/table", NODES: str(AGENTS), FOLDER: str(gang.experiment.path), "TMPDIR": tmp}
        agents = Agents([sys.executable, "-m", "tests.benchmarks.scale_agents"], plan, has_queue=True)
        measured = Measured(agents, table, selector)
        with _counted(measured), agents.waking(selector):
            try:
                yield gang, measured, pipe
            finally:
                agents.dismiss()


@contextmanager
def _counted(measured: Measured) -> Iterator[None]:
    """Count the messages that this process sends."""
    plain = Line._put

    def put(line: Line, unsealed: Unsealed) -> None:
        measured.job_messages[0] += 1
        plain(line, unsealed)

    Line._put = put  # type: ignore[method-assign, assignment]
    yield
    Line._put = plain  # type: ignore[method-assign]


def _end_entrypoints(pipe: Path) -> None:
    """Let the shells read the end of their pipe."""
    os.close(os.open(pipe, os.O_WRONLY))


def _differences(before: Counters, after: Counters) -> list[str]:
    messages = [now - then for then, now in zip(before.messages, after.messages, strict=True)]
    files = [now - then for then, now in zip(before.files, after.files, strict=True)]
    logs = [now - then for then, now in zip(before.logs, after.logs, strict=True)]
    cpu_ms = [1000 * (now - then) for then, now in zip(before.cpu_s, after.cpu_s, strict=True)]
    return [
        str(after.job_messages - before.job_messages),
        f"{messages[0]:.0f}",
        f"{statistics.mean(messages[1:]):.2f}",
        f"{files[0]:.0f}",
        f"{statistics.mean(files[1:]):.1f}",
        f"{statistics.mean(logs[1:]):.1f}",
        f"{1000 * (after.job_cpu_s - before.job_cpu_s):.0f}",
        f"{cpu_ms[0]:.0f}",
        f"{statistics.median(cpu_ms[1:]):.1f}",
    ]


def _cpu_s(pid: int) -> float:
    """Return the CPU time of a process's main thread in seconds; 0 if there is no such process."""
    with suppress(OSError):
        if pid:
            return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
    return 0.0


def _pss_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024
