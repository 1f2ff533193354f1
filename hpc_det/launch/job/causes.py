"""Why an attempt ended, from facts: the ranks' outcome, the failures, the stop request, the scheduler; what it has
saved, and whether it had the time to; and what its logs say by the experiment's log policies (Determined's).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hpc_det.checkpoint.committed import newest_steps
from hpc_det.launch.log_tail import LONGEST_LINE
from hpc_det.node import full_disk
from hpc_det.node.json_files import parse_line, read_json
from hpc_det.plan.job_plan import JobPlan
from hpc_det.requeue import Cause
from hpc_det.schedulers.scheduler import run_command, scheduler
from hpc_det.store.attempt import Failure, StopRequest, failure_now, read_stop
from hpc_det.store.folders import TrialFolder
from hpc_det.store.metrics import BEGINS
from hpc_det.store.save_times import read_saves

_ENDS = {"finished": Cause.FINISHED, "waiting": Cause.WAITING}
"""By what rank 0 wrote; otherwise it was stopped."""
_CAUSES = {
    "time limit": Cause.TIME_LIMIT,
    "pause": Cause.PAUSED,
    "cancel": Cause.CANCELLED,
    "kill": Cause.CANCELLED,
    "resume check": Cause.RESUME_CHECK,
}
"""By the reason of a stop request. What a signal means, only the scheduler knows."""
SHORTEST_S = 60.0
"""Training for less than this, or for less than the longest save so far takes, leaves no time for a checkpoint."""
MAY_BE_TOO_SHORT = (Cause.PREEMPTED, Cause.TIME_LIMIT, Cause.NODE_LOST, Cause.UNHEALTHY, Cause.SCHEDULER_AWAY)
"""What comes from outside of the training. What hangs is no matter of time."""
Policies = Sequence[Mapping[str, Any]]
"""As the effective configuration has them: name, pattern, action."""


def cause_of_end(trial: TrialFolder, plan: JobPlan, number: int, code: int, failure: Failure | None) -> Cause:
    """Of attempt `number`, whose agents' launcher has ended with `code`; `failure` is the first, if any.

    Trials write an outcome, and so does `hpc_det.launch.direct` for a script that was stopped. Otherwise a script has
    heard of no stop, and its exit code 0 means that it has finished.
    """
    outcome = read_json(trial.outcome)
    stop = read_stop(trial.stop, number)
    if outcome and outcome["attempt"] == number:
        return _ENDS.get(outcome["kind"]) or cause_of_stop(plan, stop)
    if failure and (stop is None or failure.time < stop.time):
        return _of_failure(failure)
    is_killed = stop is not None and stop.reason == "kill"  # then nobody knows its exit code
    if code == 0 and not plan.runs_trial and not is_killed:
        return Cause.FINISHED
    return cause_of_stop(plan, stop) if stop else Cause.FAILED


def _of_failure(failure: Failure) -> Cause:
    if failure.unhealthy:
        return Cause.UNHEALTHY
    if failure.node_lost:
        return Cause.NODE_LOST
    if failure.scheduler_away:
        return Cause.SCHEDULER_AWAY
    if failure.disk_full:
        return Cause.DISK_FULL
    return Cause.HUNG if failure.hung else Cause.FAILED


def full_disk_of(trial: TrialFolder) -> Failure | None:
    """Why nobody could note a failure: the trial's own disk is full."""
    error = full_disk.probe(trial.path)
    return failure_now(None, full_disk.sentence(error), disk_full=True) if error else None


def cause_of_stop(plan: JobPlan, stop: StopRequest | None) -> Cause:
    """Of an attempt whose ranks were stopped. `stop` None: the shared folder does not show the request here yet."""
    if stop and stop.reason in _CAUSES:
        return _CAUSES[stop.reason]
    signalled_at = stop.time if stop else time.time()
    return scheduler(plan.scheduler).stop_cause(plan, os.environ, signalled_at, run_command)


def cause_of_silence(trial: TrialFolder, number: int) -> Cause:
    """Of an attempt whose end nobody could write down. What a signal to that job meant, nobody can say any more, but
    its ranks may have been done before.
    """
    outcome, stop = read_json(trial.outcome), read_stop(trial.stop, number)
    if outcome and outcome["attempt"] == number and outcome["kind"] in _ENDS:
        return _ENDS[outcome["kind"]]
    return Cause.NODE_LOST if stop is None else _CAUSES.get(stop.reason, Cause.PREEMPTED)


def unexplained(code: int) -> str:
    """The failure of an attempt of which no rank and no agent has noted any."""
    if code:
        return f"the agents' launcher ended with exit code {code}, and nobody said why"
    return "the entrypoint ended with exit code 0, and no rank wrote an outcome"


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


class Match(NamedTuple):
    policy: str
    """Its name, or the pattern of one without a name."""
    line: str
    """Its beginning, where it is long: the journal keeps it."""
    action: str
    """cancel_retries or exclude_node."""
    log: Path
    """Where it was found."""


def matches(policies: Policies, logs: Mapping[Path, int]) -> list[Match]:
    """The first line that each policy matches in these files, each read from this many bytes on."""
    open_ones = [(policy, re.compile(policy["pattern"])) for policy in policies if policy["pattern"]]
    found = []
    for log, line in _lines(logs):
        for policy, pattern in [(policy, pattern) for policy, pattern in open_ones if pattern.search(line)]:
            name = policy["name"] or policy["pattern"]
            found.append(Match(name, line.strip()[:LONGEST_LINE], policy["action"], log))
            open_ones.remove((policy, pattern))
    return found


def _lines(logs: Mapping[Path, int]) -> Iterator[tuple[Path, str]]:
    for log, begin in logs.items():
        with log.open("rb") as file:
            file.seek(begin)
            for line in file:
                yield log, line.decode(errors="replace")
