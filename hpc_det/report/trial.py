"""The facts of one trial, from its own files."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import accumulate
from typing import Any

from hpc_det.checkpoint.saves import Save, read_each_save
from hpc_det.report.profile import profile_of
from hpc_det.report.spans import Phase, Story, end_of, goodput, seconds_by_phase, spans_of
from hpc_det.store.folders import TrialFolder
from hpc_det.store.metrics import BEGINS, Record, read_all, reports_of
from hpc_det.view import story
from hpc_det.view.state import ExperimentState, ExperimentView
from hpc_det.view.story import AttemptStory, Metrics
from hpc_det.view.trials import trial_state

Curve = list[tuple[int, float | None]]
"""Batches and value; None for what is no finite number."""


def trial_facts(
    view: ExperimentView,
    number: int,
    state: ExperimentState,
    attempts: Sequence[AttemptStory],
    queued: Sequence[float],
    now: float,
) -> Record:
    """All of a trial. `state` is the experiment's; `queued`: when jobs were submitted that the trial waited for."""
    folder = view.folder.trial(number)
    lines, saves = read_all(folder.metrics), read_each_save(folder.saves)
    reports = reports_of(lines)
    metrics = Metrics(view.config["searcher"]).take(reports)
    told = Story(attempts=attempts, lines=lines, saves=saves, queued=queued, now=now, is_over=state.is_final)
    spans = spans_of(told)
    seconds = seconds_by_phase(spans)
    return {
        "id": number,
        "state": trial_state(view.search, number, attempts, is_over=state.is_final).value,
        "hyperparameters": _hparams(view, folder),
        "batches": metrics.batches,
        "total_batches": metrics.total,
        "best": asdict(metrics.best) if metrics.best else None,
        "reported": view.search.trials[number].value,
        "training": curves(reports, "training"),
        "validation": curves(reports, "validation"),
        "batches_per_s": speeds(lines, saves),
        "validation_s": [(line["steps"], line["seconds"]) for line in reports if "seconds" in line],
        "saves": [dict(vars(save)) for save in saves],  # asdict copies deeply: a second for a thousand trials
        "attempts": [_attempt(folder, told, attempt) for attempt in attempts],
        "spans": [{"phase": span.phase.value, "begin": span.begin, "end": span.end} for span in spans],
        "seconds": {phase.value: seconds[phase] for phase in Phase if phase in seconds},
        "goodput": goodput(seconds),
        "profile": profile_of(view, folder),
        "traces": sorted(str(path.relative_to(folder.path)) for path in folder.tensorboard.rglob("*.pt.trace.json*")),
    }


def _hparams(view: ExperimentView, folder: TrialFolder) -> dict[str, Any]:
    """What its worker has written; before that, what it is going to write."""
    written = story.read_tolerantly(folder.trial)
    found: dict[str, Any] = written["hparams"] if written else view.sample(folder.id).hparams
    return found


def _attempt(folder: TrialFolder, told: Story, attempt: AttemptStory) -> Record:
    hosts = story.read_tolerantly(folder.nodes(attempt.number)) or [attempt.host]
    ended = None if attempt.is_open and not told.is_over else end_of(told, attempt)
    return {**asdict(attempt), "ended": ended, "hosts": hosts}


def curves(reports: Sequence[Record], kind: str) -> dict[str, Curve]:
    """Of each metric that was ever a number."""
    found: dict[str, Curve] = {}
    for report in reports:
        if report["kind"] == kind:
            for name, value in report["metrics"].items():
                found.setdefault(name, []).append((report["steps"], _finite(value)))
    return {name: curve for name, curve in found.items() if any(value is not None for _, value in curve)}


def _finite(value: Any) -> float | None:
    """JSON has no NaN and no infinities: such metrics are texts."""
    return float(value) if isinstance(value, (int, float)) else None


def speeds(lines: Sequence[Record], saves: Sequence[Save]) -> Curve:
    """Batches per second between two reports of training, without the validations and saves in between."""
    return list(_speeds(lines, saves))


def _speeds(lines: Sequence[Record], saves: Sequence[Save]) -> Iterator[tuple[int, float | None]]:
    stands = {id(report) for report in reports_of(lines)}
    begins = [save.began for save in saves]
    stalls = list(accumulate((save.stall_s for save in saves), initial=0.0))
    since, batches, stalled = math.nan, 0, 0.0
    for line in lines:
        if line["kind"] == "validation":
            stalled += line.get("seconds", 0.0)
            continue
        if line["kind"] == "training" and id(line) in stands:
            saved = stalls[bisect_left(begins, line["time"])] - stalls[bisect_left(begins, since)]
            if (trained_s := line["time"] - since - stalled - saved) > 0:
                yield line["steps"], (line["steps"] - batches) / trained_s
        since, stalled = line["time"], 0.0
        batches = line["trained"] if line["kind"] == BEGINS else line["steps"]
