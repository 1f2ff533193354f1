"""Whether trials have come further already than an experiment that goes on shall train them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from hpc_det.checkpoint.committed import committed
from hpc_det.errors import UsageError
from hpc_det.store.folders import ExperimentFolder, TrialFolder
from hpc_det.store.journal import Journal
from hpc_det.store.metrics import last_reports

MaxLength = Mapping[str, int] | None
"""{unit: amount}; None where a trial trains to an end of its own."""


def check_max_length(experiment: ExperimentFolder, before: MaxLength, now: MaxLength) -> None:
    """Raises UsageError for a new length with which a trial would begin beyond its end."""
    if not now or now == before:
        return
    ((unit, amount),) = now.items()
    trained, number = max(((_trained(trial, before, unit), trial.id) for trial in experiment.trials()), default=(0, 0))
    if amount < trained:
        wanted = f"{{{unit}: {amount}}}"
        raise UsageError(
            f"--config searcher.max_length: {wanted}: trial {experiment.id}/{number} goes on from a checkpoint at "
            f"{round(trained, 2):.12g} {unit}, and would train nothing; give at least {math.ceil(trained)}, or start "
            f"another experiment with `hpc-det experiment fork {experiment.id} --config searcher.max_length='{wanted}'`"
        )


def _trained(trial: TrialFolder, before: MaxLength, unit: str) -> float:
    """How much of `unit` the checkpoint has that the trial goes on from; 0 where nothing tells.

    Of records and epochs, reports tell how many batches the length is that the trial had until now, `before`.
    """
    steps = next((found.steps for found in committed(trial.checkpoints) if not found.removed), 0)
    if unit == "batches":
        return steps
    length, total = (before or {}).get(unit), _total(trial)
    return steps * length / total if length and total else 0


def _total(trial: TrialFolder) -> int | None:
    """Batches in all, by the last report since the trial was continued, with another length perhaps."""
    events, reports = Journal(trial.journal).events(), last_reports(trial.metrics)
    former = max((event["attempt"] for event in events if event["event"] == "continued"), default=0)
    newest = next(iter(reports.values()), None)
    return newest["total"] if newest and newest["attempt"] > former else None
