"""A gang of bare loops under plain torchrun that trains on request: `python -m ... CASE ADDRESS` is a rank."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

import torch
import torch.distributed as dist

from tests.benchmarks.sgd_cases import CASES, RANKS

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "--standalone"]
LIMITS = {"RES_OPTIONS": "timeout:1 attempts:1", "CUDA_VISIBLE_DEVICES": ""}


class Torchrun:
    """The benchmark's side of the connections to the ranks."""

    def __init__(self, ranks: list[Connection]) -> None:
        self._ranks = ranks

    def train(self, steps: int) -> list[int]:
        """Train; return the times [ns] before the first batch of rank 0 and after each."""
        for rank in self._ranks:
            rank.send(steps)
        times: list[list[int]] = [rank.recv() for rank in self._ranks]
        return times[0]

    def weights(self) -> torch.Tensor:
        """End all ranks, and return their weights."""
        for rank in self._ranks:
            rank.send(0)
        return torch.tensor([rank.recv() for rank in self._ranks])[0]


@contextmanager
def torchrun(case: str, folder: Path) -> Iterator[Torchrun]:
    """Start the gang. `folder`: a new folder."""
    folder.mkdir()
    address = str(folder / "socket")
    command = [*TORCHRUN, "-m", "tests.benchmarks.sgd_torchrun", case, address]
    with Listener(address) as listener:
        process = subprocess.Popen(command, env=os.environ | LIMITS)
        try:
            connections = {rank.recv(): rank for rank in (listener.accept() for _ in range(RANKS))}
            yield Torchrun([connections[rank] for rank in range(RANKS)])
            assert process.wait() == 0
        finally:
            process.terminate()
            process.wait()


def main(name: str, address: str) -> None:
    dist.init_process_group("gloo")
    loop = CASES[name].bare_loop()
    with Client(address) as bench:
        bench.send(dist.get_rank())
        while steps := bench.recv():
            bench.send(loop.train(steps))
        bench.send(loop.weights.tolist())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
