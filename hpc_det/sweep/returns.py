"""What came of the points, for Hydra's sweeper and for people."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.utils import JobReturn, JobStatus

from hpc_det.errors import HpcDetError
from hpc_det.launch.failure import first_failure
from hpc_det.search.journal import SearchJournal
from hpc_det.search.method import Exit
from hpc_det.store.folders import ExperimentFolder, TrialFolder
from hpc_det.store.journal import Journal
from hpc_det.sweep.files import SweepFiles


class PointFailed(HpcDetError):
    """A point has no return value; it says why, and where the log lies."""


@dataclass(frozen=True, kw_only=True)
class SubmissionRecord:
    """A point that is in the queue: where it will be found. It is no result."""

    experiment: int
    trial: int
    overrides: tuple[str, ...]
    folder: Path
    """Of the trial."""

    def __repr__(self) -> str:
        return f"<point {self.trial} of experiment {self.experiment}, submitted; this is no result>"


def job_returns(experiment: ExperimentFolder, overrides: Sequence[Sequence[str]]) -> list[JobReturn]:
    """Of all points, when nothing runs any more."""
    search = SearchJournal(experiment).state()
    completed = {number for number, trial in search.trials.items() if trial.ended is Exit.COMPLETED}
    return [
        _returned(experiment, number, point) if number in completed else _failed(point, _why(experiment, number))
        for number, point in enumerate(overrides, start=1)
    ]


def submission_records(experiment: ExperimentFolder, overrides: Sequence[Sequence[str]]) -> list[JobReturn]:
    return [
        JobReturn(
            overrides=list(point),
            status=JobStatus.COMPLETED,
            _return_value=SubmissionRecord(
                experiment=experiment.id, trial=number, overrides=tuple(point), folder=experiment.trial(number).path
            ),
        )
        for number, point in enumerate(overrides, start=1)
    ]


def _returned(experiment: ExperimentFolder, trial: int, overrides: Sequence[str]) -> JobReturn:
    try:
        found: JobReturn = pickle.loads(SweepFiles(experiment).returned(trial).read_bytes())
    except FileNotFoundError:
        return _failed(overrides, f"trial {trial} of experiment {experiment.id} ended without a return value")
    except Exception as error:
        return _failed(overrides, f"trial {trial} of experiment {experiment.id}: its return value: {error!r}")
    return found


def _failed(overrides: Sequence[str], why: str) -> JobReturn:
    return JobReturn(overrides=list(overrides), status=JobStatus.FAILED, _return_value=PointFailed(why))


def _why(experiment: ExperimentFolder, number: int) -> str:
    return f"trial {number} of experiment {experiment.id}: {'; '.join(_reasons(experiment.trial(number)))}"


def _reasons(trial: TrialFolder) -> Iterator[str]:
    journal = Journal(trial.journal)
    attempt = journal.last_attempt()
    if attempt == 0:
        yield "was never begun"
        return
    failure, verdict = first_failure(trial, attempt), journal.verdict()
    if failure:
        yield failure.sentence()
    elif verdict:
        yield f"{verdict[0].value}: {verdict[2]}"
    else:
        yield "ended without a word"
    log = trial.rank_log(attempt, (failure and failure.rank) or 0)
    yield f"its log is {log if log.exists() else trial.job_log}"
