"""What an attempt has saved, and whether it had the time to save anything."""

from __future__ import annotations

import time

from hpc_det.checkpoint.committed import newest_steps
from hpc_det.node.json_files import parse_line, read_json
from hpc_det.requeue import Cause
from hpc_det.store.attempt import read_stop
from hpc_det.store.folders import TrialFolder
from hpc_det.store.metrics import BEGINS
from hpc_det.store.save_times import read_saves

SHORTEST_S = 60.0
"""Training for less than this, or for less than the longest save so far takes, leaves no time for a checkpoint."""
MAY_BE_TOO_SHORT = (Cause.PREEMPTED, Cause.TIME_LIMIT, Cause.NODE_LOST, Cause.UNHEALTHY, Cause.SCHEDULER_AWAY)
"""What comes from outside of the training. What hangs is no matter of time."""


def newest_saved(trial: TrialFolder) -> int:
    """Batches in the newest checkpoint. An app that saves by itself counts how often it did."""
    outcome = read_json(trial.outcome) or {}
    return max(newest_steps(trial.checkpoints), int(outcome.get("saves", 0)))


def was_too_short(trial: TrialFolder, attempt: int, *, late: bool) -> bool:
    """Whether an attempt that has ended had no chance to save: its training did not begin or was short, or it was told
    to stop and ended before the save did. `late`: it did not end just now, but at an unknown time.
    """
    times = _times(trial, attempt)
    if not times:
        return True
    longest_save = read_saves(trial.saves)
    shortest_s = max(SHORTEST_S, longest_save.longest_s if longest_save else 0.0)
    end = max(times) if late else time.time()
    return end - min(times) < shortest_s or _was_cut_off(trial, attempt)


def _was_cut_off(trial: TrialFolder, attempt: int) -> bool:
    """Rank 0 writes whether it has saved when it leaves; a KILL in the save leaves nothing."""
    outcome = read_json(trial.outcome) or {}
    is_saved = outcome.get("attempt") == attempt and outcome.get("saved", False)
    return read_stop(trial.stop, attempt) is not None and not is_saved


def _times(trial: TrialFolder, attempt: int) -> list[float]:
    """When the attempt's training began, and of its reports; the file may be long."""
    mark = f'"attempt": {attempt}, '.encode()
    try:
        with open(trial.metrics, "rb") as lines:
            records = [record for line in lines if mark in line and (record := parse_line(line))]
    except FileNotFoundError:
        return []
    has_begun = any(record["kind"] == BEGINS for record in records)
    return [record["time"] for record in records] if has_begun else []
