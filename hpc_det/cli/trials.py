"""hpc-det experiment list-trials, and the table of trials in `experiment describe`."""

from __future__ import annotations

from collections.abc import Sequence

from hpc_det.cli import describe_trial
from hpc_det.cli.output import Column, Record, column
from hpc_det.cli.values import number
from hpc_det.store.folders import ExperimentFolder
from hpc_det.view.state import ExperimentView
from hpc_det.view.trials import differing, flattened
from hpc_det.view.watch import state


def listed(experiment: ExperimentFolder) -> tuple[Sequence[Record], Sequence[Column]]:
    """A record for each trial, as `trial describe --json` prints it, but for attempts and checkpoints; its table."""
    view = ExperimentView(experiment)
    now = state(view)
    whole = (describe_trial.facts(view, trial, now).as_json() for trial in sorted(view.search.trials))
    trials = [{key: record[key] for key in record if key not in ("attempts", "checkpoints")} for record in whole]
    return trials, columns_of(trials, view.config["searcher"]["metric"])


def columns_of(trials: Sequence[Record], metric: str) -> list[Column]:
    """With the hyperparameters that are not the same in all of them. `metric`: the searcher's."""
    names = differing([trial["hyperparameters"] for trial in trials])
    return [
        column("ID", "id"),
        column("STATE", "state"),
        Column("BATCHES", lambda trial: f"{trial['batches']}/{trial['total_batches'] or '?'}"),
        Column("LAST", lambda trial: _number((trial["validation"] or {}).get(metric))),
        Column("BEST", lambda trial: _number((trial["best"] or {}).get("value"))),
        *(_hyperparameter(name) for name in names),
        column("WORKER", "worker"),
        column("JOB", "job_id"),
    ]


def _hyperparameter(name: str) -> Column:
    return Column(name, lambda trial: _number(flattened(trial["hyperparameters"]).get(name)))


def _number(value: object) -> str:
    return "-" if value is None else number(value)
