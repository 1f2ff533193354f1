"""What came of the points, for Hydra's sweeper and for people."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import CompactHydraException

from hpc_det.errors import HpcDetError
from hpc_det.store.folders import ExperimentFolder
from hpc_det.sweep.files import SweepFiles
from hpc_det.sweep.status import points, why_not_completed
from hpc_det.view.trials import TrialState


class PointFailed(HpcDetError, CompactHydraException):
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
    return [
        _returned(experiment, point.trial, overrides[i])
        if point.state is TrialState.COMPLETED
        else _failed(overrides[i], why_not_completed(experiment, point.trial))
        for i, point in enumerate(points(experiment))
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
    files = SweepFiles(experiment)
    try:
        found: JobReturn = pickle.loads(files.read(files.returned(trial)))
    except FileNotFoundError:
        return _failed(overrides, f"trial {trial} of experiment {experiment.id} ended without a return value")
    except Exception as error:
        return _failed(overrides, f"trial {trial} of experiment {experiment.id}: its return value: {error!r}")
    return found


def _failed(overrides: Sequence[str], why: str) -> JobReturn:
    return JobReturn(overrides=list(overrides), status=JobStatus.FAILED, _return_value=PointFailed(why))
