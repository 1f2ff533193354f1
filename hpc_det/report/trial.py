"""The facts of one trial, from its own files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hpc_det.report.profile import profile_of
from hpc_det.report.spans import Phase, TrialTimes, end_of, goodput, longest, seconds_by_phase, spans_of
from hpc_det.store.folders import TrialFolder
from hpc_det.store.metrics import Record, each
from hpc_det.store.save_times import read_each_save
from hpc_det.view.metric_history import Curve, MetricHistory
from hpc_det.view.state import ExperimentState, ExperimentView
from hpc_det.view.trial_history import SPEC, AttemptHistory, Metrics, hosts_of, read_tolerantly
from hpc_det.view.trials import trial_state

Points = list[tuple[int, float | None]]
"""Batches and value; None for what is no finite number."""
MOST_POINTS = 10_000
"""Of a curve: a trial may have a million reports. The lowest and highest values stay (see `Curve.points`)."""
MOST_SPANS = 10_000


def trial_facts(
    view: ExperimentView,
    number: int,
    state: ExperimentState,
    attempts: Sequence[AttemptHistory],
    queued: Sequence[float],
    now: float,
) -> Record:
    """All of a trial. `state` is the experiment's; `queued`: when jobs were submitted that the trial waited for."""
    folder = view.folder.trial(number)
    saves = read_each_save(folder.saves)
    history = MetricHistory(each(folder.metrics), saves)
    metrics = Metrics.read(folder, view.config["searcher"])
    times = TrialTimes(
        attempts=attempts, lines=history.attempts, saves=saves, queued=queued, now=now, is_over=state.is_final
    )
    spans = spans_of(times)
    seconds, shown = seconds_by_phase(spans), longest(spans, MOST_SPANS)
    return {
        "id": number,
        "state": trial_state(view.search, number, attempts, is_over=state.is_final).value,
        "hyperparameters": _hparams(view, folder),
        "batches": metrics.batches,
        "total_batches": metrics.total,
        "best": asdict(metrics.best) if metrics.best else None,
        "reported": view.search.trials[number].value,
        "training": curves(history.training),
        "validation": curves(history.validation),
        "batches_per_s": history.batches_per_s.points(MOST_POINTS),
        "validation_s": history.validation_s.points(MOST_POINTS),
        "saves": [dict(vars(save)) for save in saves],  # asdict copies deeply: a second for a thousand trials
        "attempts": [_attempt(folder, times, attempt) for attempt in attempts],
        "spans": [{"phase": span.phase.value, "begin": span.begin, "end": span.end} for span in shown],
        "seconds": {phase.value: seconds[phase] for phase in Phase if phase in seconds},
        "goodput": goodput(seconds),
        "profile": profile_of(view, folder),
        "traces": sorted(str(path.relative_to(folder.path)) for path in folder.tensorboard.rglob("*.pt.trace.json*")),
    }


def _hparams(view: ExperimentView, folder: TrialFolder) -> dict[str, Any]:
    """What its worker has written; before that, what it is going to write."""
    written = read_tolerantly(folder.trial, SPEC)
    found: dict[str, Any] = written["hparams"] if written else view.sample(folder.id).hparams
    return found


def _attempt(folder: TrialFolder, times: TrialTimes, attempt: AttemptHistory) -> Record:
    hosts = hosts_of(folder, attempt)
    ended = None if attempt.is_open and not times.is_over else end_of(times, attempt)
    return {**asdict(attempt), "ended": ended, "hosts": hosts}


def curves(by_name: Mapping[str, Curve]) -> dict[str, Points]:
    """Of each metric that was ever a number."""
    points = {name: curve.points(MOST_POINTS) for name, curve in by_name.items()}
    return {name: curve for name, curve in points.items() if any(value is not None for _, value in curve)}
