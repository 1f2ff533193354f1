"""The journal of a trial: append-only lines, written by its worker. Each names its attempt and its time.

{"event": "started", "job_id": "7", "worker": 0, "host": "node1"}
{"event": "ended", "cause": "preempted", "steps": 120, "user_error": false, "too_short": false,
 "action": "requeue", "why": ..., "failure": null, "late": false}   late: written by a later start, since this one
                                                                        could not
{"event": "problem", "problem": ...}     what the job could not do after that end
{"event": "continued"}                   the trial goes on although it was over; failures count from here on
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_det.errors import HpcDetError, shown
from hpc_det.node.json_files import DamagedFile, Moment, Shape, append_line, insist_on, read_journal
from hpc_det.requeue import Action, AttemptEnd, Cause, Decision

_EVENT: Shape = {"event": str, "attempt": int, "time": Moment}
_SHAPES: dict[str, Shape] = {
    "started": {"job_id": str, "worker": int, "host": str},
    "ended": {"cause": str, "action": str, "steps": int, "user_error": bool, "why": str, "failure": str | None},
    "problem": {"problem": str},
    "continued": {},
}
_CAUSES, _ACTIONS = {cause.value for cause in Cause}, {action.value for action in Action}
_FINAL = (Action.DONE.value, Action.GIVE_UP.value)


class Overtaken(HpcDetError):
    """Another job goes on with the trial: this one was believed gone with its node."""


@dataclass(frozen=True)
class Journal:
    path: Path

    def events(self) -> list[dict[str, Any]]:
        """Raises HpcDetError for a damaged line."""
        events = read_journal(self.path)
        for event in events:
            insist_on({**_EVENT, **_SHAPES.get(str(event.get("event")), {})}, event, self.path)
            if event["event"] not in _SHAPES:
                raise DamagedFile(f"{self.path}: damaged: {shown(event['event'])}: no such event; remove that line")
            is_end = event["event"] == "ended"
            if is_end and (event["cause"] not in _CAUSES or event["action"] not in _ACTIONS):
                raise DamagedFile(
                    f"{self.path}: damaged: attempt {event['attempt']} ended by {shown(event['cause'])}, with "
                    f"{shown(event['action'])}: no such end; remove that line"
                )
        _insist_on_order(events, self.path)
        return events

    def started(self, attempt: int, job_id: str, worker: int = 0) -> None:
        self._append("started", attempt, job_id=job_id, worker=worker, host=socket.gethostname())

    def ended(
        self, attempt: int, end: AttemptEnd, decision: Decision, failure: str | None, *, late: bool = False
    ) -> None:
        """`late`: by a later start, which knows that it ended, and not when."""
        self._append(
            "ended",
            attempt,
            cause=end.cause.value,
            steps=end.steps,
            user_error=end.user_error,
            too_short=end.too_short,
            action=decision.action.value,
            why=decision.why,
            failure=failure,
            late=late,
        )

    def continued(self) -> None:
        """The trial shall go on although it was over."""
        self._append("continued", self.last_attempt())

    def problem(self, attempt: int, problem: str) -> None:
        self._append("problem", attempt, problem=problem)

    def last_attempt(self) -> int:
        """0 before the first one."""
        return _last_attempt(self.events())

    def insist_on_last(self, attempt: int) -> None:
        """Raises Overtaken where a later attempt has begun: two jobs may be alive at once, when one was believed gone
        with its node, and only the later one may write.
        """
        if (last := self.last_attempt()) > attempt:
            raise Overtaken(f"attempt {last} of this trial has begun; this one, {attempt}, writes no more")

    def open_job(self) -> tuple[int, str] | None:
        """Worker and job of the attempt that has started and not ended."""
        events = self.events()
        number = _open_attempt(events)
        started = (event for event in events if event["event"] == "started" and event["attempt"] == number)
        return next(((event["worker"], event["job_id"]) for event in started), None)

    def open_attempt(self) -> int | None:
        """The attempt that has started and not ended."""
        return _open_attempt(self.events())

    def history(self) -> list[AttemptEnd]:
        return [
            AttemptEnd(
                cause=Cause(event["cause"]),
                steps=event["steps"],
                user_error=event["user_error"],
                too_short=event.get("too_short", False),
            )
            for event in self._ends()
        ]

    def verdict(self) -> tuple[Cause, Action, str] | None:
        """How the last ended attempt ended, what was decided, and why."""
        ends = self._ends()
        if not ends:
            return None
        return Cause(ends[-1]["cause"]), Action(ends[-1]["action"]), ends[-1]["why"]

    def _ends(self) -> list[dict[str, Any]]:
        """Since the trial was continued last."""
        ends: list[dict[str, Any]] = []
        for event in self.events():
            is_over = bool(ends) and ends[-1]["action"] in _FINAL
            if event["event"] == "continued" or (event["event"] == "started" and is_over):
                ends = []  # a trial that was over starts only where it was continued, if that line is lost
            elif event["event"] == "ended":
                ends.append(event)
        return ends

    def _append(self, event: str, attempt: int, **details: Any) -> None:
        append_line(self.path, {"event": event, "attempt": attempt, "time": time.time(), **details})


def _last_attempt(events: list[dict[str, Any]]) -> int:
    return max((event["attempt"] for event in events), default=0)


def _open_attempt(events: list[dict[str, Any]]) -> int | None:
    last = _last_attempt(events)
    has_ended = any(event["event"] == "ended" and event["attempt"] == last for event in events)
    return last if last and not has_ended else None


def _insist_on_order(events: list[dict[str, Any]], path: Path) -> None:
    """Attempts begin in the order of their numbers, and none begins after its end: otherwise a number that is too low
    would be given once more. Raises DamagedFile.
    """
    last, ended = 1, set[int]()
    for event in events:
        number = event["attempt"]
        if event["event"] == "ended":
            ended.add(number)
        elif event["event"] == "started":
            if number < last or number in ended:
                raise DamagedFile(
                    f"{path}: damaged: attempt {number} begins after attempt {last} has begun, or has ended; correct "
                    "its number, or remove that line"
                )
            last = number
