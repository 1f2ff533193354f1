"""Measure from the start of a job to the first batch on the last of 6 ranks, beside plain processes and torchrun by
hand.

They take turns, so that the machine's noise affects all alike. Without torch, the ranks' own start is short enough to
show what the job adds to it.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from hpc_det.launch.direct import rank_environment
from hpc_det.node.network import free_port
from tests.benchmarks.table import show
from tests.launch.gang import Gang
from tests.store.test_attempt import ATTEMPT

RANKS = 6
ROUNDS = {"a line of Python": 15, "a batch with torch": 5}
TRAINS = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.Linear(32, 10)
model(torch.randn(32, 32)).sum().backward()
dist.all_reduce(model.weight.grad)
"""
NOTES_THE_TIME = """
import os, time
with open(f"began-{os.environ['RANK']}", "w") as file:
    file.write(str(time.monotonic()))
os._exit(0)
"""
LIMITS = {"RES_OPTIONS": "timeout:1 attempts:1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
"""The job's ranks have these, too."""


def main() -> None:
    for title, work in (("a line of Python", "none"), ("a batch with torch", "torch")):
        taken: dict[str, list[float]] = {}
        for _ in range(ROUNDS[title]):
            for name, start in STARTS.items():
                if work == "torch" or "torchrun" not in name:
                    taken.setdefault(name, []).append(_seconds(start, work))
        plain = taken["plain processes"]
        show(
            f"{RANKS} ranks, each {title}, {ROUNDS[title]} rounds: seconds from the start to the last rank's",
            ("", "min", "median", "median beside plain processes of its round"),
            [(name, *_row(values, plain)) for name, values in taken.items()],
        )


def _row(values: list[float], plain: list[float]) -> tuple[str, str, str]:
    added = statistics.median(value - beside for value, beside in zip(values, plain, strict=True))
    return f"{min(values):.3f}", f"{statistics.median(values):.3f}", f"{added:+.3f}"


def _seconds(start: Callable[[Gang, str], None], work: str) -> float:
    with tempfile.TemporaryDirectory() as state, tempfile.TemporaryDirectory() as tmp:
        gang = Gang(Path(state), Path(tmp))
        (gang.code / "train.py").write_text((TRAINS if work == "torch" else "") + NOTES_THE_TIME)
        began = time.monotonic()
        start(gang, work)
        return max(float((gang.code / f"began-{rank}").read_text()) for rank in range(RANKS)) - began


def _plain(gang: Gang, work: str) -> None:
    attempt = {"nodes": 1, "node_rank": 0, "ranks_per_node": RANKS}
    here = type(ATTEMPT)(**{**vars(ATTEMPT), **attempt, "master_addr": "127.0.0.1", "master_port": free_port()})
    command = [sys.executable, "train.py", work]
    environments = [os.environ | LIMITS | rank_environment(here, rank) for rank in range(RANKS)]
    for process in [subprocess.Popen(command, cwd=gang.code, env=env) for env in environments]:
        process.wait()


def _torchrun(gang: Gang, work: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}"]
    at = ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    subprocess.run([*command, *at, "train.py", work], cwd=gang.code, env=os.environ | LIMITS, check=True)


def _job(launcher: str) -> Callable[[Gang, str], None]:
    def start(gang: Gang, work: str) -> None:
        words = [sys.executable, "-m", f"hpc_det.launch.{launcher}", "train.py", work]
        gang.plan(words, ranks_per_node=RANKS)
        assert gang.start_job().wait() == 0, gang.trial.job_log.read_text()

    return start


STARTS = {
    "plain processes": _plain,
    "a job, direct": _job("direct"),
    "torchrun by hand": _torchrun,
    "a job, torchrun": _job("torch_distributed"),
}


if __name__ == "__main__":
    main()
