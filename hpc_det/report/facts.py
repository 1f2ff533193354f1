"""What there is to say about an experiment, as plain data. Nothing here draws, and nothing writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hpc_det.config.merge import Tree, leaves
from hpc_det.report.importance import importances
from hpc_det.report.profile import course_of
from hpc_det.report.rungs import brackets_of
from hpc_det.report.spans import Phase, goodput
from hpc_det.report.trial import trial_record
from hpc_det.search.sample import is_nested
from hpc_det.store.folders import ExperimentFolder
from hpc_det.view.config import shown_config
from hpc_det.view.state import ExperimentState, ExperimentView
from hpc_det.view.summary import best, why
from hpc_det.view.trial_facts import trials_of
from hpc_det.view.trial_history import AttemptHistory, Validation, checkpoint_to_take
from hpc_det.view.trials import differing, flattened, length_unit

Record = dict[str, Any]


def facts(view: ExperimentView, state: ExperimentState, now: float) -> Record:
    """All of an experiment as of `now`, in seconds since the epoch, as all moments in it. Can be written as JSON."""
    plan, searcher = view.plan(), view.config["searcher"]
    found = [*trials_of(view, state)]
    queued = _submissions(view, {trial.id: trial.attempts for trial in found})
    trials = [trial_record(trial, queued[trial.id], now) for trial in found]
    seconds, best_one = _seconds(trials), _best(view, trials)
    return {
        "id": view.id,
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
        "brackets": brackets_of(view.search, view.told),
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
    """With the checkpoint to take."""
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
    """Of the best trial or, where that has no timings, the first that has some."""
    timed = [trial["id"] for trial in trials if trial["profile"] and trial["profile"]["timings"]]
    if not timed:
        return None
    return course_of(view.folder.trial(best["trial"] if best and best["trial"] in timed else timed[0]))


def _drawn_by_logarithm(space: Tree, prefix: str = "") -> Iterator[str]:
    """The names of hyperparameters, dotted where nested, whose range is of the kind log."""
    for name, spec in space.items():
        if is_nested(spec):
            yield from _drawn_by_logarithm(spec, f"{prefix}{name}.")
        elif isinstance(spec, Mapping) and spec["type"] == "log":
            yield f"{prefix}{name}"


def _importance(view: ExperimentView, trials: Sequence[Record]) -> Record | None:
    """By the reports at the length that most trials have reached: those at others are no fair comparison."""
    told = [entry for entry in view.told if entry["event"] == "reported"]
    lengths = Counter(entry["until"] for entry in told)
    if not lengths or len(trials) < 2:
        return None
    length, _ = lengths.most_common(1)[0]
    sign = 1 if view.config["searcher"]["smaller_is_better"] else -1
    hparams = {trial["id"]: flattened(trial["hyperparameters"]) for trial in trials}
    values = {entry["trial"]: entry["value"] for entry in told if entry["until"] == length}
    points = [(hparams[trial], None if value is None else sign * value) for trial, value in values.items()]
    names = differing([trial["hyperparameters"] for trial in trials])
    return {
        "length": length,
        "trials": len(points),
        "names": [asdict(importance) for importance in importances(points, names)],
    }


def _seconds(trials: Sequence[Record]) -> dict[Phase, float]:
    found: dict[Phase, float] = {}
    for phase in Phase:
        if amount := sum(trial["seconds"].get(phase.value, 0.0) for trial in trials):
            found[phase] = amount
    return found


def _submissions(view: ExperimentView, told: Mapping[int, Sequence[AttemptHistory]]) -> dict[int, list[float]]:
    """When the jobs were submitted that each trial waited for: those whose first attempt is one of its own."""
    first: dict[tuple[int, float], float] = {}
    for attempts in told.values():
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
        for number, attempts in told.items()
    }


def _submitted_for(view: ExperimentView, attempt: AttemptHistory) -> list[float]:
    """The submission that brought the worker of this attempt; none where somebody started it by hand."""
    jobs = (job for job in view.jobs if job.first <= attempt.worker < job.first + job.workers)
    return [job.submitted for job in jobs if job.submitted <= attempt.started][-1:]


def _config(folder: ExperimentFolder) -> list[Record]:
    """Each value of the effective configuration and who wrote it, secrets masked."""
    config, origins = shown_config(folder)
    return [{"key": path, "value": value, "origin": origins[path]} for path, value in leaves(config)]
