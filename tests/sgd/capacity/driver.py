"""The driver of a capacity in tests: a run folder whose node agents are stand-ins.

As a program inside a job, it follows the lines of RUN/orders ("renew HOST...", "stop"), and writes its state to
RUN/state.

    python -m tests.sgd.capacity.driver RUN_FOLDER
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_det.node.json_files import read_lines
from hpc_det.sgd.capacity import Allocation, Capacity, allocation
from hpc_det.sgd.elastic import agents
from hpc_det.store.run_folder import RunFolder
from tests.wait import DEADLINE_S, wait_for

STAND_IN = "tests.sgd.capacity.stand_in"


@dataclass(frozen=True)
class Run:
    path: Path

    @classmethod
    def make(cls, path: Path) -> Run:
        RunFolder(path).make()
        (path / "agents").mkdir()
        return cls(path)

    def agents(self) -> list[dict[str, Any]]:
        """Return the first note of every agent that has started so far, by host and then in order of their start."""
        files = sorted(self.path.glob("agents/*.jsonl"), key=lambda path: path.stat().st_ctime_ns)
        return sorted((lines[0] for path in files if (lines := read_lines(path))), key=lambda note: str(note["host"]))

    def hosts(self) -> list[str]:
        return [note["host"] for note in self.agents()]

    def warnings(self) -> set[tuple[str, str]]:
        files = self.path.glob("agents/*.jsonl")
        return {(file.stem.partition("-")[0], line["leaving"]) for file in files for line in read_lines(file)[1:]}

    def wait_for_agents(self, count: int, deadline_s: float = DEADLINE_S) -> list[dict[str, Any]]:
        with suppress(AssertionError):
            wait_for(lambda: len(self.agents()) >= count, deadline_s)
        assert len(self.agents()) == count, (self.agents(), self.logs())
        return self.agents()

    def state(self) -> str:
        """Return the last state that the driver in a job has written."""
        path = self.path / "state"
        return path.read_text() if path.exists() else ""

    def logs(self) -> dict[str, str]:
        files = [path for folder in ("logs", "jobs") for path in self.path.glob(f"{folder}/*") if path.suffix != ".pkl"]
        return {path.name: path.read_text(errors="replace") for path in files}

    def end(self, note: dict[str, Any]) -> None:
        """Kill an agent by SIGKILL, as the kernel does when memory is short."""
        os.kill(note["pid"], signal.SIGKILL)

    def hang_up(self) -> None:
        (self.path / "hung-up").touch()

    def tell(self, order: str) -> None:
        with (self.path / "orders").open("a") as file:
            file.write(f"{order}\n")


def job_counts(capacity: Capacity) -> list[tuple[int, int, str]]:
    """Return (number, of how many, state) of the jobs in each state."""
    found = re.findall(r"(\d+) of (\d+) jobs (?:is|are) (\w+)", capacity.state())
    return [(int(some), int(jobs), state) for some, jobs, state in found]


def renew_until(condition: Callable[[], bool], capacity: Capacity, run: Run, deadline_s: float = DEADLINE_S) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, (capacity.state(), run.agents(), run.logs())
        capacity.renew([])
        time.sleep(0.1)


def main(run: Run) -> None:
    """Run an allocation in a job and follow the orders in RUN/orders."""
    agents.MODULE = STAND_IN
    allocation.LEAVE_S = 1.0  # type: ignore[attr-defined]  # a step does not see that one of its nodes is off
    capacity = Allocation()
    (run.path / "capacity").write_text(f"{capacity.host} {capacity.slots} {capacity.has_gpus}\n")
    capacity.start(run.path, capacity.slots)
    done = 0
    while True:
        orders = (run.path / "orders").read_text().splitlines() if (run.path / "orders").exists() else []
        missing: list[str] = []
        for order in orders:
            word, *missing = order.split()
            if word == "stop":
                capacity.stop()
                (run.path / "stopped").touch()
                return
        if len(orders) > done or missing:
            capacity.renew(missing)
        done = len(orders)
        (run.path / "state").write_text(capacity.state())
        time.sleep(0.1)


if __name__ == "__main__":
    print(os.getcwd(), flush=True)
    main(Run(Path(sys.argv[1])))
