"""The facts of one trial, from its own files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from hpc_det.report.spans import Phase, TrialTimes, end_of, goodput, longest, seconds_by_phase, spans_of
from hpc_det.store.folders import TrialFolder
from hpc_det.store.metrics import Record
from hpc_det.view.metric_history import Curve
from hpc_det.view.trial_facts import TrialFacts
from hpc_det.view.trial_history import AttemptHistory, hosts_of

Points = list[tuple[int, float | None]]
"""Batches and value; None for what is no finite number."""
MOST_POINTS = 10_000
"""Of a curve: a trial may have a million reports. The lowest and highest values stay (see `Curve.points`)."""
MOST_SPANS = 10_000


def trial_record(found: TrialFacts, queued: Sequence[float], now: float) -> Record:
    """All of a trial. `queued`: when jobs were submitted that the trial waited for."""
    folder, history, metrics = found.folder, found.history(), found.metrics
    times = TrialTimes(
        attempts=found.attempts,
        lines=history.attempts,
        saves=found.saves,
        queued=queued,
        now=now,
        is_over=found.is_over,
    )
    spans = spans_of(times)
    seconds, shown = seconds_by_phase(spans), longest(spans, MOST_SPANS)
    return {
        "id": found.id,
        "state": found.state.value,
        "hyperparameters": found.hparams,
        "batches": metrics.batches,
        "total_batches": metrics.total,
        "best": asdict(metrics.best) if metrics.best else None,
        "reported": found.reported,
        "training": curves(history.training),
        "validation": curves(history.validation),
        "batches_per_s": history.batches_per_s.points(MOST_POINTS),
        "validation_s": history.validation_s.points(MOST_POINTS),
        "saves": [dict(vars(save)) for save in found.saves],  # asdict copies deeply: a second for a thousand trials
        "attempts": [_attempt(folder, times, attempt) for attempt in found.attempts],
        "spans": [{"phase": span.phase.value, "begin": span.begin, "end": span.end} for span in shown],
        "seconds": {phase.value: seconds[phase] for phase in Phase if phase in seconds},
        "goodput": goodput(seconds),
        "profile": found.profile(),
        "traces": sorted(str(path.relative_to(folder.path)) for path in folder.tensorboard.rglob("*.pt.trace.json*")),
    }


def _attempt(folder: TrialFolder, times: TrialTimes, attempt: AttemptHistory) -> Record:
    hosts = hosts_of(folder, attempt)
    ended = None if attempt.is_open and not times.is_over else end_of(times, attempt)
    return {**asdict(attempt), "ended": ended, "hosts": hosts}


def curves(by_name: Mapping[str, Curve]) -> dict[str, Points]:
    """Of each metric that was ever a number."""
    points = {name: curve.points(MOST_POINTS) for name, curve in by_name.items()}
    return {name: curve for name, curve in points.items() if any(value is not None for _, value in curve)}
