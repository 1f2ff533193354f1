"""Attempts of a trial as sentences, for `describe` and the logs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from hpc_det.errors import some
from hpc_det.requeue import Action, Cause
from hpc_det.view.formatting import clock
from hpc_det.view.trial_history import AttemptHistory

_ENDS = {
    Cause.FINISHED: "finished at batch {batches}",
    Cause.PREEMPTED: "preempted at batch {batches}",
    Cause.TIME_LIMIT: "out of time at batch {batches}",
    Cause.FAILED: "failed; {saved}",
    Cause.NODE_LOST: "lost its node; {saved}",
    Cause.CANCELLED: "cancelled; {saved}",
    Cause.WAITING: "waits for the searcher at batch {batches}",
    Cause.PAUSED: "paused at batch {batches}",
    Cause.HUNG: "hung; {saved}",
    Cause.DISK_FULL: "disk full; {saved}",
    Cause.SCHEDULER_AWAY: "the scheduler was away; {saved}",
    Cause.RESUME_CHECK: "stopped at batch {batches} to check its resume",
    Cause.UNHEALTHY: "a node failed its checks; {saved}",
}
_NEXT = {Action.REQUEUE: "back into the queue", Action.RESTART: "started again", Action.GIVE_UP: "given up"}


def attempts_in_words(
    attempts: Sequence[AttemptHistory], now: float, *, is_over: bool, known: str = ""
) -> Iterator[str]:
    """Yield a sentence about each attempt, in which each cause is written once.

    `known`: a text that is printed before; causes in it are not repeated. `is_over`: as in `attempt_in_words`.
    """
    for attempt in attempts:
        sentence = attempt_in_words(attempt, now, is_over=is_over, known=known)
        known = f"{known}\n{sentence}"
        yield sentence


def attempt_in_words(attempt: AttemptHistory, now: float, *, is_over: bool, known: str = "") -> str:
    """Return a sentence about an attempt.

    `is_over`: nothing of the experiment runs any more. `known`: a text whose causes are not repeated.
    """
    start = f"attempt {attempt.number} on {some(attempt.nodes or [attempt.host])}"
    since = clock(attempt.started, now)
    if attempt.ended is None or attempt.action is None:
        return f"{start} from {since}: its end was not recorded" if is_over else f"{start} since {since}"
    sentence = f"{start} from {since} to {clock(attempt.ended, now)}: {_end_in_words(attempt, known)}"
    action = Action(attempt.action)
    if action in _NEXT:
        sentence += f", {_NEXT[action]}"
    reason = f"({attempt.why})"
    if (action in (Action.RESTART, Action.GIVE_UP) or attempt.why != attempt.cause) and reason not in known:
        sentence += f" {reason}"
    problems = [problem for problem in attempt.problems if problem not in known]
    return "; ".join([sentence, *problems, *(["continued"] if attempt.continued else [])])


def _end_in_words(attempt: AttemptHistory, known: str) -> str:
    saved = f"newest checkpoint at batch {attempt.batches}" if attempt.batches else "no checkpoint"
    end = _ENDS[Cause(attempt.cause)].format(batches=attempt.batches, saved=saved)
    if not attempt.failure:
        return end
    if gist(attempt.failure) in known:
        return f"same cause as above; {end}"
    clauses = attempt.failure.split("; ")
    while len(clauses) > 1 and clauses[-1] in known:  # a remedy that was printed with other numbers before
        clauses.pop()
    return "; ".join([*clauses, end])


_RANK = re.compile(r"rank \d+(?: on \S+)?: ")


def gist(failure: str) -> str:
    """Return a failure without its rank: ranks that fail together fail for the same cause."""
    found = _RANK.match(failure)
    return failure[found.end() :] if found else failure
