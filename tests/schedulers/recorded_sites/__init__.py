"""Recorded answers of schedulers, and a `run` that replays them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hpc_det.schedulers.pbs import detect as pbs
from hpc_det.schedulers.pbs.hosts import NODES
from hpc_det.schedulers.scheduler import CommandError, Run
from hpc_det.schedulers.slurm import detect as slurm

HERE = Path(__file__).parent
SLURM = {slurm.CONFIG: "config.txt", slurm.SINFO: "sinfo.txt", slurm.PARTITIONS: "partitions.txt"}
PBS = {NODES: "nodes.json", pbs.QUEUES: "queues.json", pbs.SERVER: "server.json", pbs.SCHEDULER: "sched.txt"}


def said(folder: str, file: str) -> str:
    return (HERE / folder / file).read_text()


def replay(folder: str, commands: Mapping[tuple[str, ...], str], **answers: str) -> Run:
    """Return a `run` that replays recordings. `answers`, by command, take precedence; others are not found."""

    def run(command: Sequence[str]) -> str:
        if command[0] in answers:
            return answers[command[0]]
        if tuple(command) not in commands:
            raise CommandError(f"{command[0]}: not found on PATH")
        return said(folder, commands[tuple(command)])

    return run
