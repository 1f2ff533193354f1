"""Measure the memory of 8 ranks before they construct a model, and of what a node keeps beside them, in the same run as
plain processes.

`python -m tests.benchmarks rank_memory`. Each rank imports torch and creates a process group of gloo; while all of them
wait, /proc/PID/smaps_rollup is read (proc(5)). PSS divides a page that several processes map by their number, so a sum
of PSS is the memory that all of them use. Anonymous pages are those that are not pages of a file, such as a library;
*own* are those anonymous pages that no other process shares, which the end of the process would free.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from hpc_det.launch.direct import rank_environment
from hpc_det.node.network import free_port
from hpc_det.node.process import children
from tests.benchmarks.start import LIMITS
from tests.benchmarks.table import show
from tests.launch.gang import Gang
from tests.processes import modules, ranks
from tests.store.test_attempt import ATTEMPT
from tests.wait import wait_for

RANKS = 8
WAITS = """
import os, time
import torch.distributed as dist
dist.is_initialized() or dist.init_process_group("gloo")
open(f"up-{os.environ['RANK']}", "w").close()
while not os.path.exists("end"):
    time.sleep(0.05)
os._exit(0)
"""


class Memory(NamedTuple):
    """Megabytes of one process, or the median of several."""

    pss: float
    anonymous: float
    """The anonymous part of `pss`."""
    own: float

    @classmethod
    def of(cls, pid: int) -> Memory:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        kb = {name: int(rest.split()[0]) for name, rest in (line.split(":") for line in lines)}
        return cls(kb["Pss"] / 1024, kb["Pss_Anon"] / 1024, kb["Private_Dirty"] / 1024)

    @classmethod
    def median(cls, pids: Iterable[int]) -> Memory:
        return cls(*map(statistics.median, zip(*map(cls.of, pids), strict=True)))


def main() -> None:
    rows = [row for name, start in STARTS.items() for row in _measured(name, start)]
    header = ("", "PSS", "anonymous", "own")
    show(f"MB of each of {RANKS} ranks (median), and of the other processes of the node", header, rows)


def _measured(name: str, start: Callable[[Gang], subprocess.Popen[bytes] | None]) -> Iterator[tuple[str, ...]]:
    with tempfile.TemporaryDirectory() as state, tempfile.TemporaryDirectory() as tmp:
        gang = Gang(Path(state), Path(tmp))
        (gang.code / "train.py").write_text(WAITS)
        (gang.code / "model_def.py").write_text(f"import hpc_det.pytorch\n{WAITS}")  # waits before the class
        with _until_ended(gang):
            job = start(gang)
            wait_for(lambda: len(list(gang.code.glob("up-*"))) == RANKS, otherwise=gang.trial.job_log.read_text)
            pids = ranks(gang.trial.path) if job else children(os.getpid())
            assert len(pids) == RANKS, pids
            yield _row(f"{name}: a rank", Memory.median(pids))
            for other, pid in _others(job.pid).items() if job else ():
                yield _row(f"{name}: {other}", Memory.of(pid))


def _row(name: str, memory: Memory) -> tuple[str, ...]:
    return name, *(f"{megabytes:.1f}" for megabytes in memory)


@contextmanager
def _until_ended(gang: Gang) -> Iterator[None]:
    """At the end of the block, end the ranks and wait for all processes that it has started."""
    try:
        yield
    finally:
        (gang.code / "end").touch()
        wait_for(lambda: not ranks(gang.trial.path))
        gang.close()
        for process in _PLAIN:
            process.wait()
        _PLAIN.clear()


def _others(job: int) -> dict[str, int]:
    """Return the processes of a job's node beside the ranks, by name."""
    agent = next(pid for pid in children(job) if "hpc_det.launch.agent" in modules(pid))
    found = {"job": job, "agent": agent}
    for pid in children(agent):
        if "hpc_det.node.fork_server" in modules(pid):
            return found | {"fork server": pid, "launcher": children(pid)[0]}
    return found | {"launcher": children(agent)[0]}


_PLAIN: list[subprocess.Popen[bytes]] = []
"""The plain processes that run."""


def _plain(gang: Gang) -> None:
    here = type(ATTEMPT)(
        **vars(ATTEMPT)
        | {"nodes": 1, "node_rank": 0, "ranks_per_node": RANKS}
        | {"master_addr": "127.0.0.1", "master_port": free_port()}
    )
    for rank in range(RANKS):
        environment = os.environ | LIMITS | rank_environment(here, rank)
        _PLAIN.append(subprocess.Popen([sys.executable, "train.py"], cwd=gang.code, env=environment))


def _job(*words: str, nursery: bool = True) -> Callable[[Gang], subprocess.Popen[bytes]]:
    def start(gang: Gang) -> subprocess.Popen[bytes]:
        gang.plan([sys.executable, "-m", "hpc_det.launch.direct", *words], ranks_per_node=RANKS, nursery=nursery)
        return gang.start_job()

    return start


STARTS: dict[str, Callable[[Gang], subprocess.Popen[bytes] | None]] = {
    "plain processes": _plain,
    "a job, a script": _job("train.py"),
    "a job, a trial class": _job("--trial", "model_def:Trial"),
    "a job, `launch.nursery: false`": _job("train.py", nursery=False),
}


if __name__ == "__main__":
    main()
