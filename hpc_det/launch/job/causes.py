"""Why an attempt ended, from facts: the ranks' outcome, the failures, the stop request, the scheduler; what it has
saved, and whether it had the time to; and what its logs say by the experiment's log policies (Determined's).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hpc_det.checkpoint.committed import newest_steps
from hpc_det.launch.log_tail import LONGEST_LINE
from hpc_det.node import full_disk
from hpc_det.node.json_files import parse_line, read_json
from hpc_det.plan.job_plan import JobPlan
from hpc_det.requeue import Cause
from hpc_det.schedulers.scheduler import run_command, scheduler
from hpc_det.store.attempt import Failure, StopRequest, failure_now, first_failure, read_stop
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
_MAY_BE_TOO_SHORT = (Cause.PREEMPTED, Cause.TIME_LIMIT, Cause.NODE_LOST, Cause.UNHEALTHY, Cause.SCHEDULER_AWAY)
"""What comes from outside of the training. What hangs is no matter of time."""
Policies = Sequence[Mapping[str, Any]]
"""As the effective configuration has them: name, pattern, action."""


@dataclass(frozen=True)
class AttemptFacts:
    """What the files of one attempt say of its end."""

    trial: TrialFolder
    plan: JobPlan
    number: int

    @property
    def has_outcome(self) -> bool:
        return self._outcome is not None

    def failure(self, code: int) -> Failure | None:
        """Return the first one. `code`: of the agents' launcher. Where that failed and no clear failure was noted, the
        trial's own disk may be full.
        """
        noted = first_failure(self.trial, self.number)
        if not code or (noted and noted.is_clear):
            return noted
        error = full_disk.probe(self.trial.path)
        return failure_now(None, full_disk.sentence(error), disk_full=True) if error else noted

    def unexplained(self, code: int) -> Failure:
        """Return the failure of an attempt of which no rank and no agent has noted any."""
        if code:
            return failure_now(
                None, f"the agents' launcher ended with exit code {code}, and no agent or rank reported a cause"
            )
        return failure_now(None, "the entrypoint ended with exit code 0, and no rank wrote an outcome")

    def cause(self, code: int, failure: Failure | None) -> Cause:
        """Return why it ended. `code`: of the agents' launcher; `failure`: the first, if any.

        Trials write an outcome, and so does `hpc_det.launch.direct` for a script that was stopped. Otherwise a script
        has heard of no stop, and its exit code 0 means that it has finished.
        """
        stop = self._stop
        if outcome := self._outcome:
            return _ENDS.get(outcome["kind"]) or self.cause_of_stop(stop)
        if failure and (stop is None or failure.time < stop.time):
            return _of_failure(failure)
        is_killed = stop is not None and stop.reason == "kill"  # then nobody knows its exit code
        if code == 0 and not self.plan.runs_trial and not is_killed:
            return Cause.FINISHED
        return self.cause_of_stop(stop) if stop else Cause.FAILED

    def cause_of_stop(self, stop: StopRequest | None) -> Cause:
        """Return why its ranks were stopped. `stop` None: the shared folder does not show the request here yet."""
        if stop and stop.reason in _CAUSES:
            return _CAUSES[stop.reason]
        signalled_at = stop.time if stop else time.time()
        return scheduler(self.plan.scheduler).stop_cause(self.plan, os.environ, signalled_at, run_command)

    def cause_of_silence(self) -> Cause:
        """Return why an attempt ended whose end nobody could write down. What a signal to that job meant is not known
        any more, but its ranks may have been done before.
        """
        outcome, stop = self._outcome, self._stop
        if outcome and outcome["kind"] in _ENDS:
            return _ENDS[outcome["kind"]]
        return Cause.NODE_LOST if stop is None else _CAUSES.get(stop.reason, Cause.PREEMPTED)

    def newest_saved(self) -> int:
        """Return the batches in the trial's newest checkpoint. An app that saves by itself counts how often it did."""
        outcome = read_json(self.trial.outcome) or {}
        return max(newest_steps(self.trial.checkpoints), int(outcome.get("saves", 0)))

    def was_too_short(self, cause: Cause, *, late: bool) -> bool:
        """Return whether a trial class had no chance to save: its training did not begin or was short, or it was told
        to stop and ended before the save did. `late`: it did not end just now, but at an unknown time.
        """
        if not self.plan.runs_trial or cause not in _MAY_BE_TOO_SHORT:
            return False
        times = self._times()
        if not times:
            return True
        longest_save = read_saves(self.trial.saves)
        shortest_s = max(SHORTEST_S, longest_save.longest_s if longest_save else 0.0)
        end = max(times) if late else time.time()
        return end - min(times) < shortest_s or self._was_cut_off()

    def _was_cut_off(self) -> bool:
        """Rank 0 writes whether it has saved when it leaves; a KILL in the save leaves nothing."""
        return self._stop is not None and not (self._outcome or {}).get("saved", False)

    def _times(self) -> list[float]:
        """When its training began, and of its reports; the file may be long."""
        mark = f'"attempt": {self.number}, '.encode()
        try:
            with open(self.trial.metrics, "rb") as lines:
                records = [record for line in lines if mark in line and (record := parse_line(line))]
        except FileNotFoundError:
            return []
        has_begun = any(record["kind"] == BEGINS for record in records)
        return [record["time"] for record in records] if has_begun else []

    @property
    def _outcome(self) -> dict[str, Any] | None:
        """What rank 0 wrote, if that is of this attempt."""
        outcome: dict[str, Any] | None = read_json(self.trial.outcome)
        return outcome if outcome and outcome["attempt"] == self.number else None

    @property
    def _stop(self) -> StopRequest | None:
        return read_stop(self.trial.stop, self.number)


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
