"""The journal of a trial: append-only lines, written by its worker. Each also has its "attempt" and "time".

{"event": "started", "job_id": "7", "worker": 0, "host": "node1"}
{"event": "ended", "cause": "preempted", "steps": 120, "user_error": false, "too_short": false,
 "action": "requeue", "why": ..., "failure": null, "late": false, "nodes": ["node1", "node2"]}
{"event": "problem", "problem": ...}     a failed requeue, or a line of a log that a log policy matched
{"event": "continued"}                   the user continued a finished trial; failures are counted from here

"late" is true if a later start wrote the end, because the job of the attempt was killed before it could write it.
"nodes" are the hosts of the gang by node rank; empty if the attempt ended before its agents had met.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
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
_FINAL = (Action.DONE.value, Action.GIVE_UP.value)  # no attempt follows, unless the user continues the trial


class Overtaken(HpcDetError):
    """Another job has resumed the trial, because this job was taken for lost with its node."""


@dataclass(frozen=True)
class Journal:
    """The journal of one trial."""

    path: Path

    def events(self) -> list[dict[str, Any]]:
        """Return all events, oldest first. Raises DamagedFile for a damaged line."""
        events = read_journal(self.path)
        for event in events:
            insist_on({**_EVENT, **_SHAPES.get(str(event.get("event")), {})}, event, self.path)
            if event["event"] not in _SHAPES:
                raise DamagedFile(f"{self.path}: damaged: unknown event {shown(event['event'])}; remove that line")
            is_end = event["event"] == "ended"
            if is_end and (event["cause"] not in _CAUSES or event["action"] not in _ACTIONS):
                raise DamagedFile(
                    f"{self.path}: damaged: attempt {event['attempt']} ended with unknown cause "
                    f"{shown(event['cause'])} or action {shown(event['action'])}; remove that line"
                )
        _insist_on_order(events, self.path)
        return events

    def started(self, attempt: int, job_id: str, worker: int = 0) -> None:
        """Append the start of an attempt on this host."""
        self._append("started", attempt, job_id=job_id, worker=worker, host=socket.gethostname())

    def ended(
        self,
        attempt: int,
        end: AttemptEnd,
        decision: Decision,
        failure: str | None,
        *,
        late: bool = False,
        nodes: Sequence[str] = (),
    ) -> None:
        """Append the end of an attempt, and the decision that follows from it.

        `late`: a later start writes this, and does not know when the attempt ended. `nodes`: hosts by node rank.
        """
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
            nodes=list(nodes),
        )

    def continued(self) -> None:
        """Append that the user continues a trial that was finished."""
        self._append("continued", self.last_attempt())

    def problem(self, attempt: int, problem: str) -> None:
        """Append a problem of the attempt: a failed requeue, or a line of a log that a log policy matched."""
        self._append("problem", attempt, problem=problem)

    def last_attempt(self) -> int:
        """Return the number of the last attempt; 0 before the first."""
        return _last_attempt(self.events())

    def insist_on_last(self, attempt: int) -> None:
        """Raise Overtaken if a later attempt has started.

        Two jobs of a trial may run at once if one was taken for lost with its node; only the later one may write.
        """
        if (last := self.last_attempt()) > attempt:
            raise Overtaken(f"attempt {last} has started; this job, attempt {attempt}, must not write any more")

    def open_job(self) -> tuple[int, str] | None:
        """Return worker and job id of the attempt that has started and not ended; None: there is none."""
        events = self.events()
        number = _open_attempt(events)
        started = (event for event in events if event["event"] == "started" and event["attempt"] == number)
        return next(((event["worker"], event["job_id"]) for event in started), None)

    def open_attempt(self) -> int | None:
        """Return the number of the attempt that has started and not ended; None: there is none."""
        return _open_attempt(self.events())

    def history(self) -> list[AttemptEnd]:
        """Return how the attempts ended since the trial was last continued, oldest first."""
        return [
            AttemptEnd(
                cause=Cause(event["cause"]),
                steps=event["steps"],
                user_error=event["user_error"],
                too_short=event.get("too_short", False),  # missing in journals of earlier versions
                failure=event["failure"] or "",
            )
            for event in self._ends()
        ]

    def verdict(self) -> tuple[Cause, Action, str] | None:
        """Return how the last ended attempt ended, the decision about it, and the reason; None: there is none."""
        ends = self._ends()
        if not ends:
            return None
        return Cause(ends[-1]["cause"]), Action(ends[-1]["action"]), ends[-1]["why"]

    def _ends(self) -> list[dict[str, Any]]:
        """Return the "ended" events since the trial was last continued."""
        ends: list[dict[str, Any]] = []
        for event in self.events():
            is_over = bool(ends) and ends[-1]["action"] in _FINAL
            if event["event"] == "continued" or (event["event"] == "started" and is_over):
                ends = []  # a finished trial starts again only if it was continued, even if that line was lost
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
    """Raise DamagedFile unless attempts start in the order of their numbers, and before their end.

    Otherwise the next attempt could get a number that was used before.
    """
    last, ended = 1, set[int]()
    for event in events:
        number = event["attempt"]
        if event["event"] == "ended":
            ended.add(number)
        elif event["event"] == "started":
            if number < last or number in ended:
                raise DamagedFile(
                    f"{path}: damaged: attempt {number} starts after the start of attempt {last} or after its own "
                    "end; correct its number, or remove that line"
                )
            last = number
