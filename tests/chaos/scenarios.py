"""What is disturbed: each takes a folder, and says what is promised to stay from then on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hpc_det.core.checkpoint import CheckpointContext
from hpc_det.core.distributed import Distributed
from hpc_det.requeue import Action, AttemptEnd, Cause, Decision
from hpc_det.store.files import append_line, write_json
from hpc_det.store.journal import Journal

Say = Callable[[Any], None]


def saves(folder: Path, say: Say, *, first: int = 1, behind: bool = False) -> None:
    """Three checkpoints of which the newest is kept; says the batches of each when it is committed."""
    checkpoints = CheckpointContext(folder / "checkpoints", Distributed())
    checkpoints.newest()
    for steps in range(10 * first, 10 * (first + 3), 10):
        files = {"state.pth": {"weights": torch.full((1000,), float(steps)), "steps": steps}}
        if behind:
            checkpoints.begin(steps, files)
            checkpoints.settled(wait=True)
        else:
            checkpoints.save(steps, files)
        say(steps)
        checkpoints.prune({}, best=0, latest=1, smaller_is_better=True)


def journal(folder: Path, say: Say) -> None:
    """Two attempts; says each event that is written."""
    trial = Journal(folder / "journal.jsonl")
    first = trial.last_attempt() + 1
    for attempt in (first, first + 1):
        trial.started(attempt, str(attempt))
        say(["started", attempt])
        end = AttemptEnd(cause=Cause.PREEMPTED, steps=10 * attempt)
        trial.ended(attempt, end, Decision(Action.REQUEUE, "preempted"), None)
        say(["ended", attempt])


def lines(folder: Path, say: Say) -> None:
    """Lines of which each is durable."""
    for number in range(4):
        append_line(folder / "metrics.jsonl", {"number": number, "text": "ä" * 50})
        say(number)


def replaced(folder: Path, say: Say) -> None:
    """One file that is written again and again."""
    for number in range(4):
        write_json(folder / "trial.json", {"number": number, "text": "ä" * 50})
        say(number)


def saves_behind(folder: Path, say: Say) -> None:
    saves(folder, say, behind=True)


SCENARIOS = ("saves", "saves_behind", "journal", "lines", "replaced")
