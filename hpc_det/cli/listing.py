"""hpc-det experiment list."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from operator import itemgetter
from typing import Any

from hpc_det.cli.output import Column, Record
from hpc_det.cli.values import iso, number
from hpc_det.errors import HpcDetError
from hpc_det.search.best import best_trial
from hpc_det.store.about import read_about
from hpc_det.store.folders import ExperimentFolder
from hpc_det.view import story
from hpc_det.view.state import ExperimentState, ExperimentView
from hpc_det.view.story import Metrics
from hpc_det.view.trials import counted, length_unit
from hpc_det.view.watch import states

DAMAGED = "(files damaged)"


def listed(experiments: Sequence[ExperimentFolder]) -> list[dict[str, Any]]:
    """One record for each experiment, as `list --json` prints it. One with damaged files hides no other."""
    views = [_view(experiment) for experiment in experiments]
    found = states(view for view in views if view)
    return [
        _record(experiment, view, found[view.id] if view else ExperimentState.ERROR)
        for experiment, view in zip(experiments, views, strict=True)
    ]


def _view(experiment: ExperimentFolder) -> ExperimentView | None:
    try:
        return ExperimentView(experiment)
    except HpcDetError:
        return None


def _record(experiment: ExperimentFolder, view: ExperimentView | None, state: ExperimentState) -> dict[str, Any]:
    record: dict[str, Any] = {
        "id": experiment.id,
        "name": DAMAGED,
        "description": "",
        "labels": [],
        "archived": False,
        "state": state.value,
        **dict.fromkeys(("batches", "total_batches", "best", "trials", "progress")),
        "submitted": iso(view.jobs[0].submitted) if view and view.jobs else None,
    }
    with suppress(HpcDetError, OSError, ValueError, LookupError, TypeError):
        record |= {**read_about(experiment, view.config).as_json(), **progress(view, state)} if view else {}
    return record


def progress(view: ExperimentView, state: ExperimentState) -> dict[str, Any]:
    """How far it is. Of several trials the search knows; a list must not read a thousand folders."""
    search, searcher = view.search, view.config["searcher"]
    counts = asdict(counted(search, is_running=state is ExperimentState.RUNNING))
    if view.has_many_trials:
        return {
            "batches": None,
            "total_batches": None,
            "best": best_of_many(view),
            "trials": counts,
            "progress": search.method.progress,
        }
    metrics = Metrics.read(view.folder.trial(), searcher)
    known = metrics.batches / metrics.total if metrics.total else 0.0
    done = 1.0 if state is ExperimentState.COMPLETED else min(known, 1.0)
    return {
        "batches": metrics.batches,
        "total_batches": metrics.total,
        "best": best_of_one(metrics, 1),
        "trials": counts,
        "progress": done,
    }


def best_of_many(view: ExperimentView) -> dict[str, Any] | None:
    searcher = view.config["searcher"]
    best = best_trial(view.told, searcher)
    if best is None:
        return None
    batches = best.length if length_unit(searcher) == "batches" else None
    return {"metric": best.metric, "value": best.value, "batches": batches, "trial": best.trial}


def best_of_one(metrics: Metrics, trial: int) -> dict[str, Any] | None:
    return {**asdict(metrics.best), "trial": trial} if metrics.best else None


def _best(record: Record) -> str:
    best, trials = record["best"], record["trials"]
    whose = f" (trial {best['trial']})" if best and trials["expected"] > 1 else ""
    return f"{best['metric']} {number(best['value'])}{whose}" if best else "-"


def progress_in_words(record: Record) -> str:
    """Batches of the only trial, or trials that have ended."""
    if record["batches"] is not None:
        return f"{record['batches']}/{record['total_batches'] or '?'} batches"
    if (trials := record["trials"]) is None:
        return "-"
    return f"{trials['completed'] + trials['failed']}/{trials['expected']} trials, {record['progress']:.0%}"


def _when(submitted: str | None) -> str:
    return story.clock(datetime.fromisoformat(submitted).timestamp(), time.time()) if submitted else "-"


COLUMNS = (
    Column("ID", lambda record: str(record["id"])),
    Column("NAME", itemgetter("name")),
    Column("STATE", itemgetter("state")),
    Column("PROGRESS", progress_in_words),
    Column("BEST", _best),
    Column("SUBMITTED", lambda record: _when(record["submitted"])),
)
