"""How busy the GPUs of a trial are, as its nodes said last."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import Any

from hpc_det.node.json_files import parse_line
from hpc_det.store.folders import TrialFolder

NEW_S = 60.0
"""Nodes write every 10 s; older lines are of an earlier attempt, or of batches that are measured no more."""
_END = 2**16
"""Bytes of a file; a line about a node with many GPUs is of one or two thousand."""


def gpu_use(trial: TrialFolder) -> float | None:
    """Percent, the mean of all GPUs that somebody said something of lately; None where nobody did."""
    newest = [line for file in trial.profile.glob("system-*.jsonl") if (line := _newest_line(file))]
    uses = [gpu["util"] for line in newest if time.time() - line["time"] < NEW_S for gpu in line["gpus"].values()]
    return statistics.fmean(uses) if uses else None


def _newest_line(path: Path) -> dict[str, Any] | None:
    with open(path, "rb") as file:
        file.seek(max(os.fstat(file.fileno()).st_size - _END, 0))
        lines = file.read().splitlines()
    return next((line for line in map(parse_line, reversed(lines)) if line), None)
