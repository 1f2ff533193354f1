"""The time of a trial, divided into spans of one phase each from its submission to its end, and the goodput.

An attempt has its slots from its start to its end. Validations and saves interrupt training. Batches after the
checkpoint from which the trial resumed are lost, since they are trained again.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from hpc_det.requeue import Action, Cause
from hpc_det.store.save_times import Save
from hpc_det.view.metric_history import AttemptLines
from hpc_det.view.trial_history import AttemptHistory


class Phase(str, enum.Enum):
    """The phases that divide the time of a trial."""

    QUEUED = "queued"
    WAITING = "waiting"
    """Waiting for the search, which may train the trial further."""
    PAUSED = "paused"
    STARTING = "starting"
    """From the start of an attempt, or from the end of one that is restarted, to the start of training."""
    TRAINING = "training"
    """Batches that the trial kept."""
    VALIDATING = "validating"
    SAVING = "saving"
    LOST = "lost"
    """Batches that were trained again later, or that no checkpoint contains."""
    ENDING = "ending"
    """From the last save to the end of an attempt."""
    UNKNOWN = "unknown"
    """The time of an attempt whose entrypoint does not report when it trains."""

    @property
    def has_slots(self) -> bool:
        """True if the trial occupies its slots in this phase."""
        return self not in (Phase.QUEUED, Phase.WAITING, Phase.PAUSED)


class Span(NamedTuple):
    """A part of a trial's time in one phase."""

    phase: Phase
    begin: float
    """Seconds since the epoch, as `end`."""
    end: float


@dataclass(frozen=True, kw_only=True)
class TrialTimes:
    """The recorded times of one trial."""

    attempts: Sequence[AttemptHistory]
    lines: Mapping[int, AttemptLines]
    """Times of each attempt from metrics.jsonl, keyed by the number of the attempt."""
    saves: Sequence[Save]
    queued: Sequence[float] = field(default=())
    """Submission times of the jobs for which the trial waited, in seconds since the epoch, oldest first."""
    now: float
    """Seconds since the epoch; the end of spans that have not ended."""
    is_over: bool
    """True if nothing of the experiment runs any more."""

    @property
    def reports_training(self) -> bool:
        """True if the trial reports when it starts to train."""
        return any(lines.began is not None for lines in self.lines.values())


_AFTER = {
    Action.REQUEUE: Phase.QUEUED,
    Action.RESTART: Phase.STARTING,
    Action.WAIT: Phase.WAITING,
    Action.PAUSE: Phase.PAUSED,
}
"""Phase from the end of an attempt to the start of the next one, for each action after the attempt. After other actions
only a new submission continues the trial.
"""
_PAUSES = {Phase.VALIDATING, Phase.SAVING}
_VIOLENT = {Cause.FAILED, Cause.NODE_LOST, Cause.HUNG, Cause.DISK_FULL, Cause.UNHEALTHY, Cause.SCHEDULER_AWAY}
"""Causes that leave no time for a save: batches since the last save are lost."""


def spans_of(trial: TrialTimes) -> list[Span]:
    """Return the spans of the whole trial in order, without empty ones."""
    found = list(_before(trial))
    for attempt, later in pairwise([*trial.attempts, None]):
        assert attempt is not None
        found += _of_attempt(trial, attempt)
        found += _gap(trial, attempt, later)
    return [span for span in found if span.end > span.begin]


def _before(trial: TrialTimes) -> Iterator[Span]:
    """Yield the time in the queue before the first attempt."""
    first = trial.attempts[0].started if trial.attempts else trial.now
    submitted = [moment for moment in trial.queued if moment <= first]
    if submitted and (trial.attempts or not trial.is_over):
        # the first attempt ran in the job that was submitted last before it
        yield Span(Phase.QUEUED, submitted[-1] if trial.attempts else submitted[0], first)


def _gap(trial: TrialTimes, attempt: AttemptHistory, later: AttemptHistory | None) -> Iterator[Span]:
    """Yield the spans after an attempt: until the next one, or until now if one may follow."""
    if attempt.action is None or (later is None and trial.is_over):
        return
    begin, end = end_of(trial, attempt), later.started if later else trial.now
    phase = _AFTER.get(Action(attempt.action))
    if phase and phase is not Phase.PAUSED:
        yield Span(phase, begin, end)
        return
    submitted = next((moment for moment in trial.queued if begin < moment <= end), end)
    if phase:
        yield Span(phase, begin, submitted)
    yield Span(Phase.QUEUED, submitted, end)


def end_of(trial: TrialTimes, attempt: AttemptHistory) -> float:
    """Return the end of an attempt or, if it was not recorded in time, the time of its last report or save."""
    if attempt.is_open and not trial.is_over:
        return trial.now
    if attempt.ended is not None and not attempt.late:
        return attempt.ended
    signs = [trial.lines[attempt.number].last] if attempt.number in trial.lines else []
    later = min((other.started for other in trial.attempts if other.number > attempt.number), default=trial.now)
    signs += [save.began + save.stall_s for save in trial.saves if attempt.started <= save.began < later]
    return max(signs, default=attempt.started)


def _of_attempt(trial: TrialTimes, attempt: AttemptHistory) -> Iterator[Span]:
    """Yield the spans of one attempt, from its start to its end."""
    end, lines = end_of(trial, attempt), trial.lines.get(attempt.number)
    if lines is None or lines.began is None:
        yield Span(Phase.STARTING if trial.reports_training else Phase.UNKNOWN, attempt.started, end)
        return
    yield Span(Phase.STARTING, attempt.started, lines.began)
    kept_until, last = _kept(trial, attempt, lines.began, end)
    yield from _training(trial, lines, lines.began, kept_until)
    rest = kept_until
    if last:
        rest = min(last.began + last.stall_s, end)
        yield Span(Phase.SAVING, last.began, rest)
    yield Span(Phase.LOST if _has_lost(trial, attempt, lines) else Phase.ENDING, rest, end)


def _kept(trial: TrialTimes, attempt: AttemptHistory, began: float, end: float) -> tuple[float, Save | None]:
    """Return the time until which the attempt's training was kept, and the save that kept it, if any."""
    batches = _resumed_at(trial, attempt)
    if batches is None:
        return end, None
    saves = [save for save in trial.saves if began <= save.began < end and save.batches <= batches]
    return (saves[-1].began, saves[-1]) if saves else (began, None)


def _resumed_at(trial: TrialTimes, attempt: AttemptHistory) -> int | None:
    """Return the number of batches from which the next attempt resumed; None if this attempt still runs."""
    later = (lines for number, lines in trial.lines.items() if number > attempt.number and lines.began is not None)
    if following := next(later, None):
        return following.trained
    if attempt.is_open and not trial.is_over:
        return None
    saved = [save.batches for save in trial.saves]
    return attempt.batches if attempt.batches is not None else max(saved, default=0)


def _has_lost(trial: TrialTimes, attempt: AttemptHistory, lines: AttemptLines) -> bool:
    """Return whether the attempt trained batches that were not kept, or may have, since it ended without a save."""
    kept = _resumed_at(trial, attempt)
    if kept is None:
        return False
    is_violent = attempt.cause is None or Cause(attempt.cause) in _VIOLENT
    return is_violent or max(lines.reached, lines.trained) > kept


def _training(trial: TrialTimes, lines: AttemptLines, begin: float, end: float) -> Iterator[Span]:
    """Yield the training between two times, and the validations and saves that interrupt it."""
    for stop in sorted(_stops(trial, lines, begin, end), key=lambda stop: stop.begin):
        if begin <= stop.begin and stop.end <= end:
            yield Span(Phase.TRAINING, begin, stop.begin)
            yield stop
            begin = stop.end
    yield Span(Phase.TRAINING, begin, end)


def _stops(trial: TrialTimes, lines: AttemptLines, begin: float, end: float) -> Iterator[Span]:
    """Yield the saves that began between two times, and all validations of the attempt."""
    saves = (save for save in trial.saves if begin <= save.began <= end)
    yield from (Span(Phase.SAVING, save.began, save.began + save.stall_s) for save in saves)
    for time, seconds in zip(lines.validation_ends, lines.validation_s, strict=True):
        yield Span(Phase.VALIDATING, time - seconds, time)


def longest(spans: Sequence[Span], most: int) -> list[Span]:
    """Return about `most` spans at most, for a picture.

    If there are more, the shortest validations and saves become part of the training around them.
    """
    if len(spans) <= most:
        return list(spans)
    pauses = sorted((span.end - span.begin for span in spans if span.phase in _PAUSES), reverse=True)
    shortest = pauses[min(most // 2, len(pauses) - 1)]
    found: list[Span] = []
    for span in spans:
        is_training = span.phase is Phase.TRAINING or (span.phase in _PAUSES and span.end - span.begin <= shortest)
        if is_training and found and found[-1].phase is Phase.TRAINING:
            found[-1] = Span(Phase.TRAINING, found[-1].begin, span.end)
        else:
            found.append(Span(Phase.TRAINING, span.begin, span.end) if is_training else span)
    return found


# --- goodput


def seconds_by_phase(spans: Sequence[Span]) -> dict[Phase, float]:
    """Return the seconds of each phase that occurred."""
    found: dict[Phase, float] = {}
    for span in spans:
        found[span.phase] = found.get(span.phase, 0.0) + span.end - span.begin
    return found


def goodput(seconds: dict[Phase, float]) -> float | None:
    """Return kept training as a share of the time with slots, from 0 to 1.

    None without such time, or if an entrypoint does not report when it trains.
    """
    allocated = sum(amount for phase, amount in seconds.items() if phase.has_slots)
    if not allocated or Phase.UNKNOWN in seconds:
        return None
    return seconds.get(Phase.TRAINING, 0.0) / allocated
