"""The facts of a report as plain data: trials, spans, rungs, profiles, configuration.

This module draws nothing and writes no files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hpc_det.config.merge import Tree, leaves
from hpc_det.report.importance import importances
from hpc_det.report.spans import Phase, TrialTimes, end_of, goodput, longest, seconds_by_phase, spans_of
from hpc_det.search.adaptive import AdaptiveSearch
from hpc_det.search.asha import AsyncHalving
from hpc_det.search.method import Exit
from hpc_det.search.sample import is_nested
from hpc_det.search.state import Entry, SearchState, length_of, length_unit
from hpc_det.store.folders import ExperimentFolder, TrialFolder
from hpc_det.view.metric_history import Curve
from hpc_det.view.performance.limits import slowest
from hpc_det.view.performance.system import over_batches
from hpc_det.view.performance.timings import Stretch, read_timings, total
from hpc_det.view.state import ExperimentState, ExperimentView, shown_config
from hpc_det.view.summary import best, why
from hpc_det.view.trial_facts import TrialFacts, trials_of
from hpc_det.view.trial_history import AttemptHistory, Validation, checkpoint_to_take, hosts_of
from hpc_det.view.trials import differing, flattened

Record = dict[str, Any]
Points = list[tuple[int, float | None]]
"""Pairs of batches and value; None for a value that is not a finite number."""
MOST_POINTS = 10_000
"""Largest number of points of a curve, since a trial may have a million reports. `Curve.points` keeps the extremes."""
MOST_SPANS = 10_000
"""Largest number of spans of a trial; see `spans.longest`."""
MOST_COLUMNS = 120
"""Largest number of columns in the picture of a rank's time; more could not be distinguished."""


def facts(view: ExperimentView, state: ExperimentState, now: float) -> Record:
    """Return the facts of an experiment as of `now`, ready for JSON. Times are seconds since the epoch."""
    plan, searcher = view.plan(), view.config["searcher"]
    found = [*trials_of(view, state)]
    queued = _submissions(view, {trial.id: trial.attempts for trial in found})
    trials = [trial_record(trial, queued[trial.id], now) for trial in found]
    seconds, best_one = _seconds(trials), _best(view, trials)
    return {
        "id": view.id,
        "named": view.folder.named(),
        "name": view.about().name,
        "state": state.value,
        "why": why(view, state) if state.is_final else None,
        "folder": str(view.folder.path),
        "searcher": searcher,
        "unit": length_unit(searcher) or "batches",
        "slots": plan.world_size,
        "nodes": plan.nodes,
        "scheduler": plan.scheduler,
        **_times(view, trials, state, now),
        "best": best_one,
        "hyperparameters": differing([trial["hyperparameters"] for trial in trials]) if len(trials) > 1 else [],
        "logarithmic": list(_drawn_by_logarithm(view.config["hyperparameters"])),
        "importance": _importance(view, trials),
        "brackets": brackets_of(view.search, view.reports),
        "seconds": {phase.value: amount for phase, amount in seconds.items()},
        "goodput": goodput(seconds),
        "course": _course(view, trials, best_one),
        "trials": trials,
        "config": _config(view.folder),
    }


def _times(view: ExperimentView, trials: Sequence[Record], state: ExperimentState, now: float) -> Record:
    attempts = [attempt for trial in trials for attempt in trial["attempts"]]
    ends = [attempt["ended"] for attempt in attempts if attempt["ended"]]
    return {
        "submitted": view.jobs[0].submitted if view.jobs else None,
        "began": min((attempt["started"] for attempt in attempts), default=None),
        "ended": max(ends, default=None) if state.is_final else None,
        "now": now,
    }


def _best(view: ExperimentView, trials: Sequence[Record]) -> Record | None:
    """Return the best validation and the checkpoint to use for it; None before the first validation."""
    by_trial = {trial["id"]: trial["best"] for trial in trials}
    only = by_trial.get(1)
    found = best(view) if view.has_many_trials else only and {**only, "trial": 1}
    if not found:
        return None
    validation = by_trial[found["trial"]]
    best_validation = Validation(**validation) if validation else None
    taken = checkpoint_to_take(view.folder.trial(found["trial"]), best_validation)
    return {
        "trial": found["trial"],
        "metric": found["metric"],
        "value": found["value"],
        "checkpoint": {"path": str(taken.path), "batches": taken.steps} if taken else None,
    }


def _course(view: ExperimentView, trials: Sequence[Record], best: Record | None) -> Record | None:
    """Return the `course_of` the best trial or, if that has no timings, of the first trial that has."""
    timed = [trial["id"] for trial in trials if trial["profile"] and trial["profile"]["timings"]]
    if not timed:
        return None
    return course_of(view.folder.trial(best["trial"] if best and best["trial"] in timed else timed[0]))


def _drawn_by_logarithm(space: Tree, prefix: str = "") -> Iterator[str]:
    """Yield the names of hyperparameters with a log range, dotted if nested."""
    for name, spec in space.items():
        if is_nested(spec):
            yield from _drawn_by_logarithm(spec, f"{prefix}{name}.")
        elif isinstance(spec, Mapping) and spec["type"] == "log":
            yield f"{prefix}{name}"


def _importance(view: ExperimentView, trials: Sequence[Record]) -> Record | None:
    """Return the importance of each hyperparameter; None without reports to the search or with a single trial.

    Only reports at the length that most trials have reached count, since other values are not comparable with them.
    """
    searcher = view.config["searcher"]
    reports = [(length_of(entry, searcher), entry) for entry in view.reports if "value" in entry]
    if not reports or len(trials) < 2:
        return None
    ((length, _),) = Counter(length for length, _ in reports).most_common(1)
    sign = 1 if searcher["smaller_is_better"] else -1
    hparams = {trial["id"]: flattened(trial["hyperparameters"]) for trial in trials}
    values = {entry["trial"]: entry["value"] for at, entry in reports if at == length}
    points = [(hparams[trial], None if value is None else sign * value) for trial, value in values.items()]
    names = differing([trial["hyperparameters"] for trial in trials])
    return {
        "length": length.amount if length else None,
        "unit": length.unit if length else None,
        "trials": len(points),
        "names": [asdict(importance) for importance in importances(points, names)],
    }


def _seconds(trials: Sequence[Record]) -> dict[Phase, float]:
    found: dict[Phase, float] = {}
    for phase in Phase:
        if amount := sum(trial["seconds"].get(phase.value, 0.0) for trial in trials):
            found[phase] = amount
    return found


def _submissions(view: ExperimentView, by_trial: Mapping[int, Sequence[AttemptHistory]]) -> dict[int, list[float]]:
    """Return for each trial the submission times of the jobs of which it was the first trial, and so waited for."""
    first: dict[tuple[int, float], float] = {}
    for attempts in by_trial.values():
        for attempt in attempts:
            for moment in _submitted_for(view, attempt):
                key = attempt.worker, moment
                first[key] = min(attempt.started, first.get(key, attempt.started))
    return {
        number: sorted(
            {
                moment
                for attempt in attempts
                for moment in _submitted_for(view, attempt)
                if first[attempt.worker, moment] == attempt.started
            }
        )
        for number, attempts in by_trial.items()
    }


def _submitted_for(view: ExperimentView, attempt: AttemptHistory) -> list[float]:
    """Return, as a list of at most one, the submission time of the attempt's job; empty if it was submitted by hand."""
    jobs = (job for job in view.jobs if job.first <= attempt.worker < job.first + job.workers)
    return [job.submitted for job in jobs if job.submitted <= attempt.started][-1:]


def _config(folder: ExperimentFolder) -> list[Record]:
    """Return each value of the effective configuration with the layer that set it; secrets are masked."""
    config, origins = shown_config(folder)
    return [{"key": path, "value": value, "origin": origins[path]} for path, value in leaves(config)]


# --- trials


def trial_record(found: TrialFacts, queued: Sequence[float], now: float) -> Record:
    """Return the facts of a trial. `queued`: submission times of jobs for which the trial waited."""
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
        "profile": found.profile(history),
        "traces": sorted(str(path.relative_to(folder.path)) for path in folder.tensorboard.rglob("*.pt.trace.json*")),
    }


def _attempt(folder: TrialFolder, times: TrialTimes, attempt: AttemptHistory) -> Record:
    hosts = hosts_of(folder, attempt)
    ended = None if attempt.is_open and not times.is_over else end_of(times, attempt)
    return {**asdict(attempt), "ended": ended, "hosts": hosts}


def curves(by_name: Mapping[str, Curve]) -> dict[str, Points]:
    """Return the points of each metric that has at least one finite value."""
    points = {name: curve.points(MOST_POINTS) for name, curve in by_name.items()}
    return {name: curve for name, curve in points.items() if any(value is not None for _, value in curve)}


# --- rungs of a search by successive halving


def brackets_of(search: SearchState, reports: Sequence[Entry]) -> list[Record]:
    """Return {"rungs": [{"length", "trials": [{"trial", "value", "status"}]}]} for each bracket.

    Empty for searches without successive halving. `reports`: the trials' reports to the search, oldest first. A status
    is promoted, finished, waiting or stopped; the key `fate` repeats it for readers of earlier versions. Trials with
    invalid hyperparameters are left out.
    """
    values = {(entry["trial"], entry["until"]): entry["value"] for entry in reports if entry["event"] == "reported"}
    return [{"rungs": list(_rungs(halving, numbers, search, values))} for halving, numbers in _brackets(search)]


def _brackets(search: SearchState) -> Iterator[tuple[AsyncHalving, Sequence[int]]]:
    """Yield each bracket with the numbers of its trials in the whole search."""
    if isinstance(search.method, AsyncHalving):
        yield search.method, sorted(search.trials)
    elif isinstance(search.method, AdaptiveSearch):
        yield from ((bracket.search, bracket.numbers) for bracket in search.method.brackets)


def _rungs(
    halving: AsyncHalving, numbers: Sequence[int], search: SearchState, values: dict[tuple[int, int], float | None]
) -> Iterator[Record]:
    lengths = halving.lengths
    for index, length in enumerate(lengths):
        trials = []
        for own, number in enumerate(numbers, 1):  # `own`: the number of the trial within its bracket
            if (number, length) in values and search.trials[number].ended is not Exit.INVALID_HP:
                status = _status(halving, own, index, is_last=index + 1 == len(lengths))
                trials.append({"trial": number, "value": values[number, length], "status": status, "fate": status})
        yield {"length": length, "trials": trials}


def _status(halving: AsyncHalving, own: int, rung: int, *, is_last: bool) -> str:
    """Return the status of a trial of the bracket at a rung that it has reached."""
    if halving.rung_of(own) > rung:
        return "promoted"
    if is_last:
        return "finished"
    return "stopped" if halving.is_closed(own) else "waiting"


# --- profile


def course_of(trial: TrialFolder) -> Record:
    """Return the time of a trial's slowest rank and the load of all nodes, over the batches.

    {"trial", "rank", "host", "columns": [{"first", "last", "seconds": {part: s}}], "system": {metric: [[batches, mean,
    lowest, highest]]}}
    """
    timings = read_timings(trial.profile)
    rank = slowest([total(stretches) for stretches in timings.values()])
    columns = list(_columns(timings[rank.rank]))
    return {
        "trial": trial.id,
        "rank": rank.rank,
        "host": rank.host,
        "columns": [_column(stretches) for stretches in columns],
        "system": over_batches(trial.profile, timings, [stretches[-1].batches for stretches in columns]),
    }


def _columns(stretches: Sequence[Stretch]) -> Iterator[Sequence[Stretch]]:
    """Yield the stretches in at most MOST_COLUMNS groups of neighbours."""
    parts = min(len(stretches), MOST_COLUMNS)
    for part in range(parts):
        yield stretches[part * len(stretches) // parts : (part + 1) * len(stretches) // parts]


def _column(stretches: Sequence[Stretch]) -> Record:
    seconds = {part.value: amount for part, amount in total(stretches).parts().items()}
    return {"first": stretches[0].first, "last": stretches[-1].batches, "seconds": seconds}
