"""The experiment of a sweep: the fields of hydra.launcher as a configuration, and results for Hydra's sweeper."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import CompactHydraException

from hpc_det.config.cluster_choice import chosen_cluster
from hpc_det.config.merge import Tree
from hpc_det.config.request import Request
from hpc_det.errors import HpcDetError, UsageError
from hpc_det.node.environment_archive import shared_python
from hpc_det.plan.effective import Effective, effective
from hpc_det.store.folders import ExperimentFolder
from hpc_det.sweep.files import SweepFiles
from hpc_det.sweep.status import points, why_not_completed
from hpc_det.view.trials import TrialState

# Runs hpc_det.sweep.app on each slot, with torchrun's variables.
ENTRYPOINT = [shared_python(), "-m", "hpc_det.launch.torch_distributed", "-m", "hpc_det.sweep.app"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The fields of hydra.launcher; hydra_plugins.hpc_launcher.launchers describes them."""

    scheduler: str
    """Scheduler of the launcher, which the cluster profile must have, too."""
    cluster: str | None
    slots: int
    time_limit: str | int | None
    resource_pool: str | None
    cpus_per_slot: int | None
    memory_per_slot: str | None
    account: str | None
    qos: str | None
    constraint: str | None
    array_parallelism: int
    packed_slots: int | None
    max_restarts: int
    sbatch_args: Sequence[str]
    environment_variables: Mapping[str, Any]
    wait: bool
    poll_s: float

    def effective(
        self, name: str, folder: Path, overrides: Sequence[Sequence[str]], env: Mapping[str, str]
    ) -> Effective:
        """Return the effective configuration of an experiment with a trial for each list of overrides.

        `name`: name of the experiment; `folder`: the folder in which the app was started. Raises UsageError with every
        problem.
        """
        chosen = chosen_cluster(self.cluster, env, self.scheduler)
        cluster = chosen.profile()
        if cluster.get("scheduler") != self.scheduler:
            raise UsageError(
                f"hydra.launcher.cluster: {chosen.name!r} has the scheduler {cluster.get('scheduler')}, this launcher "
                f"is for {self.scheduler}; choose hydra/launcher=hpc_{cluster.get('scheduler')}, or another cluster"
            )
        request = Request(
            cluster=cluster,
            template=None,
            template_name=None,
            config=self._config(name),
            context_dir=folder,
            chosen=chosen,
        )
        found = effective(request)
        points: list[Tree] = [{"hyperparameters": dict(map(_split, point))} for point in overrides]
        return replace(found, points=points)

    def _config(self, name: str) -> Tree:
        """Return the experiment's configuration, as a user would write it."""
        # The schema requires a searcher with a metric. A sweep's points take the place of the searcher's trials, and no
        # decision depends on the metric (hpc_det.search.by_name).
        most = self.array_parallelism * self.slots
        return {
            "name": name,
            "entrypoint": ENTRYPOINT,
            "searcher": {"name": "single", "metric": "return value"},
            "max_restarts": self.max_restarts,
            "resources": {
                "slots_per_trial": self.slots,
                "time_limit": self.time_limit,
                "resource_pool": self.resource_pool,
                "cpus_per_slot": self.cpus_per_slot,
                "memory_per_slot": self.memory_per_slot,
                "account": self.account,
                "qos": self.qos,
                "constraint": self.constraint,
                "packed_slots": self.packed_slots,
                "max_slots": most or None,
            },
            "slurm": {"sbatch_args": list(self.sbatch_args)},
            "environment": {
                "environment_variables": [f"{key}={value}" for key, value in self.environment_variables.items()]
            },
        }


def _split(override: str) -> tuple[str, str]:
    """Return key and value of an override, both as text; the key with its prefix ("+", "++" or "~")."""
    key, _, value = override.partition("=")
    return key, value


class PointFailed(HpcDetError, CompactHydraException):
    """A point has no return value; the message contains the reason and the log to read."""


@dataclass(frozen=True, kw_only=True)
class SubmissionRecord:
    """The return value of a point with wait=false: where its result will be. It is not a result itself."""

    experiment: int
    trial: int
    overrides: tuple[str, ...]
    folder: Path
    """Folder of the trial."""

    def __repr__(self) -> str:
        return f"<point {self.trial} of experiment {self.experiment}, submitted; this is not a result>"


def job_returns(experiment: ExperimentFolder, overrides: Sequence[Sequence[str]]) -> list[JobReturn]:
    """Return a result for each point, when all have ended: its return value, or FAILED with a PointFailed.

    `overrides`: those of each point.
    """
    return [
        _returned(experiment, point.trial, overrides[i])
        if point.state is TrialState.COMPLETED
        else _failed(overrides[i], why_not_completed(experiment, point.trial))
        for i, point in enumerate(points(experiment))
    ]


def submission_records(experiment: ExperimentFolder, overrides: Sequence[Sequence[str]]) -> list[JobReturn]:
    """Return a SubmissionRecord for each point, in the form of a result."""
    # COMPLETED, because Hydra's BasicSweeper reads all return values, which raises for any other status.
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
    """Return the saved result of a point, or FAILED if it is missing or cannot be read."""
    files = SweepFiles(experiment)
    try:
        found: JobReturn = pickle.loads(files.read(files.returned(trial)))
    except FileNotFoundError:
        return _failed(overrides, f"trial {trial} of experiment {experiment.id} ended without a return value")
    except Exception as error:
        why = f"trial {trial} of experiment {experiment.id}: its return value cannot be read: {error!r}"
        return _failed(overrides, why)
    return found


def _failed(overrides: Sequence[str], why: str) -> JobReturn:
    return JobReturn(overrides=list(overrides), status=JobStatus.FAILED, _return_value=PointFailed(why))
