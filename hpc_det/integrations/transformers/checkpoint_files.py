"""The files of a Trainer's checkpoints: placed in a committed checkpoint, found there, and removed after a failure."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path


def place(source: Path, target: Path) -> None:
    """Place the files below `source` in `target`, as hard links or copies; files that are there already remain."""
    for path in sorted(source.rglob("*")):
        to = target / path.relative_to(source)
        if path.is_dir():
            to.mkdir(exist_ok=True)
        elif not to.exists():
            _link(path, to)


def clear_leftovers(output: Path, trial: Path) -> None:
    """Delete checkpoints that an earlier attempt wrote and did not commit, in an output folder below the trial's."""
    if output.is_relative_to(trial):
        for leftover in output.glob("checkpoint-*"):
            shutil.rmtree(leftover, ignore_errors=True)


def best_checkpoint(checkpoints: Path, step: int) -> Path | None:
    """Return the committed checkpoint of this optimizer step; None if there is none any more."""
    for state in checkpoints.glob("*/trainer_state.json"):
        if json.loads(state.read_text(encoding="utf-8")).get("global_step") == step:
            return state.parent
    return None


def saved_ranks(checkpoint: Path) -> int:
    """Return the number of ranks that wrote a checkpoint, 0 if it is unknown."""
    return len(list(checkpoint.glob("rng_state*.pth")))


def _link(path: Path, to: Path) -> None:
    try:
        os.link(path, to)
    except OSError:  # another file system, or one without hard links
        shutil.copy2(path, to)
