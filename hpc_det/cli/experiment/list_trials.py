"""hpc-det experiment list-trials, whose table is also a part of `experiment describe`."""

from __future__ import annotations

from collections.abc import Sequence

import click

from hpc_det.cli.arguments import any_experiment_argument
from hpc_det.cli.describe_trial import brief
from hpc_det.cli.output import Column, Output, Record, column, output_options, rows
from hpc_det.store.folders import ExperimentFolder
from hpc_det.view.formatting import columns, number_if_known
from hpc_det.view.state import ExperimentView
from hpc_det.view.trial_facts import TrialFacts, trials_of
from hpc_det.view.trials import differing, flattened
from hpc_det.view.watch import state


@click.command("list-trials")
@any_experiment_argument
@output_options
def list_trials(experiment: ExperimentFolder, output: Output) -> None:
    """List the trials of an experiment, with the hyperparameters in which they differ.

    \b
    Example:
      hpc-det experiment list-trials 12 --csv
    """
    output.table(*listed(experiment), KEYS)


KEYS = "id state worker job_id hyperparameters seed batches total_batches training validation best"  # of a record


def listed(experiment: ExperimentFolder) -> tuple[Sequence[Record], Sequence[Column]]:
    """Return the records of the trials and the columns of their table.

    A record has the keys of `trial describe --json` up to `best`: no profile, checkpoints or attempts.
    """
    view = ExperimentView(experiment)
    now = state(view)
    trials = [*map(brief, trials_of(view, now))]
    return trials, _columns(trials, view)


def table(trials: Sequence[TrialFacts], view: ExperimentView) -> list[str]:
    """Return the lines of the table; empty before the first trial."""
    records = [*map(brief, trials)]
    return columns(rows(records, _columns(records, view))) if records else []


def _columns(trials: Sequence[Record], view: ExperimentView) -> list[Column]:
    """Return the columns, among them the hyperparameters in which the trials differ."""
    metric = view.config["searcher"]["metric"]
    return [
        column("ID", "id"),
        column("STATE", "state"),
        Column("BATCHES", lambda trial: f"{trial['batches']}/{trial['total_batches'] or '?'}"),
        Column("LAST", lambda trial: number_if_known((trial["validation"] or {}).get(metric))),
        Column("BEST", lambda trial: number_if_known((trial["best"] or {}).get("value"))),
        *map(_hyperparameter, differing([trial["hyperparameters"] for trial in trials])),
        column("WORKER", "worker"),
        column("JOB", "job_id"),
    ]


def _hyperparameter(name: str) -> Column:
    return Column(name, lambda trial: number_if_known(flattened(trial["hyperparameters"]).get(name)))
