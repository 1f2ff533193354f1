"""Why an attempt ended, from facts: the ranks' outcome, the noted failures, the stop request, the scheduler's answers.

Also how much the attempt has saved, whether it had time for a checkpoint, and which lines of its logs match the
experiment's log policies (Determined's).
"""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NamedTuple

from hpc_det.checkpoint.committed import newest_steps
from hpc_det.config.entrypoint import Context
from hpc_det.config.idle_script import idle_script_note
from hpc_det.launch.log_tail import LONGEST_LINE, shortened
from hpc_det.launch.printed_causes import cause_line, failed_rank, is_of_the_code, missing_part, schedulers_notice
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
"""Causes by the `kind` that rank 0 wrote into the outcome; any other kind means that the ranks were stopped."""
_CAUSES = {
    "time limit": Cause.TIME_LIMIT,
    "pause": Cause.PAUSED,
    "cancel": Cause.CANCELLED,
    "kill": Cause.CANCELLED,
    "resume check": Cause.RESUME_CHECK,
}
"""Causes by the reason of the stop request. "signal" is missing: only the scheduler knows why it sent one."""
SHORTEST_S = 60.0
"""An attempt that trained for fewer seconds, or for less than the longest measured save, had no time to save."""
_MAY_BE_TOO_SHORT = (Cause.PREEMPTED, Cause.TIME_LIMIT, Cause.NODE_LOST, Cause.UNHEALTHY, Cause.SCHEDULER_AWAY)
"""Causes from outside the training. A hang is not one of them: more time would not help."""
_WITHOUT_CAUSE = ("exit code", "ended by signal")
"""Beginnings of the messages that the parent process of a script's rank writes (hpc_det.launch.launchers.rank)."""
_LONGEST_MATCHED = 1024
"""Bytes of a line that a log policy is matched with at once: patterns may take quadratic time."""
Policies = Sequence[Mapping[str, Any]]
"""`log_policies` of the effective configuration: maps with the keys name, pattern and action."""


@dataclass(frozen=True)
class AttemptFacts:
    """The facts about the end of one attempt, read from its files."""

    trial: TrialFolder
    plan: JobPlan
    number: int

    @property
    def has_outcome(self) -> bool:
        """Return whether a rank has written an outcome for this attempt."""
        return self._outcome is not None

    def failure(self, code: int) -> Failure | None:
        """Return the first failure, or None. `code`: the exit code of the agents' launcher."""
        noted = first_failure(self.trial, self.number)
        if not code or (noted and noted.is_clear):
            return noted
        # Without a clear failure, a full disk may have kept the agents and ranks from noting one.
        error = full_disk.probe(self.trial.path)
        return failure_now(None, full_disk.sentence(error), disk_full=True) if error else noted

    def explained(self, failure: Failure, printed: str) -> Failure:
        """Return the failure with what the output of the attempt adds to it.

        `printed`: the trial's log of this attempt, which the ranks of mpirun, srun and DeepSpeed share, and the agents'
        launcher. A failure is permanent if the code cannot be loaded.
        """
        message, cause = failure.message, failure.printed
        if failure.rank is not None and not cause and message.startswith(_WITHOUT_CAUSE):
            cause = shortened(cause_line(printed, failure.rank))
            message += f" after {cause!r}; see {self.trial.job_log}" if cause else ""
        if notice := schedulers_notice(printed):
            message += f"; {shortened(notice)}"
        reported = failed_rank(printed) if failure.rank is None else None
        codes = (failure.code, reported.code if reported else None)
        has_exited = all(code is None or 0 < code < 128 for code in codes)  # else a signal has ended it (sh(1))
        cannot_load = has_exited and self._cannot_load(cause or failure.message, failure.host)
        permanent = failure.user_error or cannot_load
        return replace(failure, message=message, printed=cause, user_error=permanent)

    def _cannot_load(self, line: str, host: str) -> bool:
        """Return whether a program that printed `line` on `host` cannot load its code, now or later.

        Not if the trial has reported metrics or saved a checkpoint before, or if this node has what is missing on
        `host`: then the code is right, and the other node lacks a file system.
        """
        if not is_of_the_code(line) or self._has_reported() or self.newest_saved():
            return False
        module, file = missing_part(line)
        if host == socket.gethostname():
            return True
        if file:
            return not os.path.exists(file)
        given = dict(item.split("=", 1) for item in self.plan.environment).get("PYTHONPATH", "")
        places = [self.plan.code, *given.split(os.pathsep), *sys.path]
        return module is None or PathFinder.find_spec(module.split(".")[0], places) is None

    def _has_reported(self) -> bool:
        """Return whether any attempt of the trial has reported metrics."""
        mark = f'"kind": "{BEGINS}"'.encode()
        try:
            with open(self.trial.metrics, "rb") as lines:
                return any(mark not in line for line in lines)
        except FileNotFoundError:
            return False

    def unexplained(self, code: int) -> Failure:
        """Return a failure for an attempt for which neither rank nor agent has noted one."""
        if code:
            return failure_now(
                None, f"the agents' launcher exited with code {code}, and no agent or rank reported a cause"
            )
        return failure_now(None, "the entrypoint exited with code 0, but no rank wrote an outcome")

    @property
    def shows_no_training(self) -> bool:
        """Return whether the trial has no report, checkpoint and outcome, as of a script that hpc_det does not see."""
        is_seen = self.plan.runs_trial or self.has_outcome or self._has_reported() or self._times()
        return not is_seen and not self.newest_saved()

    def idle_script(self) -> str | None:
        """Return a note on a script that defines a trial class and does not train it, or None."""
        entrypoint = (read_json(self.trial.experiment().effective) or {}).get("entrypoint")
        return idle_script_note(entrypoint, Context(Path(self.plan.code)))

    def cause(self, code: int, failure: Failure | None) -> Cause:
        """Return why the attempt ended. `code`: the exit code of the agents' launcher; `failure`: the first one, or
        None.

        Trials and scripts on hpc_det.core write an outcome, and `hpc_det.launch.direct` writes one for another script
        that was stopped. Another script without an outcome received no stop request, so its exit code 0 means that it
        has finished.
        """
        stop = self._stop
        if outcome := self._outcome:
            return _ENDS.get(outcome["kind"]) or self.cause_of_stop(stop)
        if failure and (stop is None or failure.time < stop.time):
            return _of_failure(failure)
        is_killed = stop is not None and stop.reason == "kill"  # the exit code means nothing then
        if code == 0 and not (self.plan.runs_trial or self._times()) and not is_killed:
            return Cause.FINISHED
        return self.cause_of_stop(stop) if stop else Cause.FAILED

    def cause_of_stop(self, stop: StopRequest | None) -> Cause:
        """Return why the ranks were stopped. `stop` None: the stop request is not visible on this node yet."""
        if stop and stop.reason in _CAUSES:
            return _CAUSES[stop.reason]
        signalled_at = stop.time if stop else time.time()
        return scheduler(self.plan.scheduler).stop_cause(self.plan, os.environ, signalled_at, run_command)

    def cause_of_silence(self) -> Cause:
        """Return why an attempt ended whose end was not recorded.

        The scheduler can no longer explain a signal to that job. But its ranks may have finished, and then the outcome
        shows it.
        """
        outcome, stop = self._outcome, self._stop
        if outcome and outcome["kind"] in _ENDS:
            return _ENDS[outcome["kind"]]
        return Cause.NODE_LOST if stop is None else _CAUSES.get(stop.reason, Cause.PREEMPTED)

    def newest_saved(self) -> int:
        """Return the batches in the newest checkpoint, or the number of saves of an app that writes its own
        checkpoints.
        """
        outcome = read_json(self.trial.outcome) or {}
        return max(newest_steps(self.trial.checkpoints), int(outcome.get("saves", 0)))

    def was_too_short(self, cause: Cause, *, late: bool) -> bool:
        """Return whether the attempt had no time to save: its training did not start, was short, or was cut off.

        False for a script whose trainings never report their start, since it is unknown whether it saves. `late`: the
        attempt ended at an unknown earlier time.
        """
        if cause not in _MAY_BE_TOO_SHORT:
            return False
        times = self._times()
        if not times:
            return self.plan.runs_trial or self._has_ever_begun()
        longest_save = read_saves(self.trial.saves)
        shortest_s = max(SHORTEST_S, longest_save.longest_s if longest_save else 0.0)
        end = max(times) if late else time.time()
        return end - min(times) < shortest_s or self._was_cut_off()

    def _was_cut_off(self) -> bool:
        """Return whether a stop request was followed by no save."""
        # Rank 0 writes into the outcome whether it has saved; a KILL during the save leaves no outcome.
        return self._stop is not None and not (self._outcome or {}).get("saved", False)

    def _has_ever_begun(self) -> bool:
        """Return whether a training has begun in any attempt."""
        mark = f'"kind": "{BEGINS}"'.encode()
        try:
            with open(self.trial.metrics, "rb") as lines:
                return any(mark in line for line in lines)
        except FileNotFoundError:
            return False

    def _times(self) -> list[float]:
        """Return the times of the attempt's reports, from the start of training; empty if training did not start."""
        mark = f'"attempt": {self.number}, '.encode()
        try:
            with open(self.trial.metrics, "rb") as lines:
                # The file may be long: parse only lines of this attempt.
                found = (parse_line(line, self.trial.metrics) for line in lines if mark in line)
                records = [record for record in found if record]
        except FileNotFoundError:
            return []
        has_begun = any(record["kind"] == BEGINS for record in records)
        return [record["time"] for record in records] if has_begun else []

    @property
    def _outcome(self) -> dict[str, Any] | None:
        """The outcome that rank 0 wrote in this attempt, or None."""
        outcome: dict[str, Any] | None = read_json(self.trial.outcome)
        return outcome if outcome and outcome["attempt"] == self.number else None

    @property
    def _stop(self) -> StopRequest | None:
        return read_stop(self.trial.stop, self.number)


def _of_failure(failure: Failure) -> Cause:
    """Return the cause that the journal records for a failure."""
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
    """A line of a log that a log policy matches."""

    policy: str
    """The policy's name, or its pattern if it has no name."""
    line: str
    """At most LONGEST_LINE characters, because the journal keeps it."""
    action: str
    """cancel_retries or exclude_node."""
    log: Path
    """The log that contains the line."""


def matches(policies: Policies, logs: Mapping[Path, int]) -> list[Match]:
    """Return the first line that each policy matches. `logs`: for each log the byte at which to start reading."""
    unmatched = [(policy, _searched(policy["pattern"])) for policy in policies if policy["pattern"]]
    found = []
    for log, line in _lines(logs):
        for policy, pattern in [(policy, pattern) for policy, pattern in unmatched if pattern.search(line)]:
            name = policy["name"] or policy["pattern"]
            found.append(Match(name, line.strip()[:LONGEST_LINE], policy["action"], log))
            unmatched.remove((policy, pattern))
    return found


def _searched(pattern: str) -> re.Pattern[str]:
    """Return the pattern to search for, without a `.*` at its start: it finds the same, in quadratic time."""
    return re.compile(re.sub(r"^(?:\.\*(?![*+?{]))+", "", pattern))


def _lines(logs: Mapping[Path, int]) -> Iterator[tuple[Path, str]]:
    """Yield each line of the logs with its log; a long line in parts of at most _LONGEST_MATCHED bytes."""
    for log, begin in logs.items():
        with log.open("rb") as file:
            file.seek(begin)
            while line := file.readline(_LONGEST_MATCHED):
                yield log, line.decode(errors="replace")
