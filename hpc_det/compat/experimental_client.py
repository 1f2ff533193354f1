"""`determined.experimental.client` on top of hpc_det.client, for scripts that were written for Determined 0.38.

There is no server: `login` and the arguments of `Determined` have no effect, attributes are current without `reload`,
and the ID of a trial is a text such as "12/7". Other names of Determined's classes raise an AttributeError.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from hpc_det import client
from hpc_det.client import ExperimentState, TrialState
from hpc_det.compat.aliases import missing
from hpc_det.errors import UsageError
from hpc_det.node.json_files import read_map
from hpc_det.view.state import shown_config

__all__ = [
    "Checkpoint",
    "Determined",
    "Experiment",
    "ExperimentState",
    "OrderBy",
    "Trial",
    "TrialMetrics",
    "TrialState",
    "create_experiment",
    "get_checkpoint",
    "get_experiment",
    "get_trial",
    "iter_trials_metrics",
    "list_experiments",
    "login",
]

_MODULE = "determined.experimental.client"


class OrderBy(enum.Enum):
    """The order of a list."""

    ASCENDING = "asc"
    DESCENDING = "desc"
    ASC = "asc"  # noqa: PIE796  # an alias that Determined has too
    DESC = "desc"  # noqa: PIE796


def login(*_arguments: Any, **_options: Any) -> None:
    """Do nothing: there is no server."""


def create_experiment(
    config: str | Path | dict[str, Any],
    model_dir: str | Path | None = None,
    includes: Sequence[str | Path] | None = None,
    template: str | None = None,
    *,
    cluster: str | None = None,
) -> Experiment:
    """Create an experiment and return it at once.

    `cluster`: name of a cluster profile; default: as `hpc_det.client.create` chooses it, for example from
    HPC_DET_CLUSTER. Raises UsageError with all problems.
    """
    return Experiment(client.create(config, model_dir, includes=includes or (), template=template, cluster=cluster))


def get_experiment(experiment_id: int) -> Experiment:
    """Return an experiment. Raises UsageError if it does not exist."""
    return Experiment(client.get(experiment_id))


def list_experiments(
    *,
    order_by: OrderBy = OrderBy.ASCENDING,
    experiment_ids: Sequence[int] | None = None,
    labels: Sequence[str] | None = None,
    users: Sequence[str] | None = None,
    states: Sequence[ExperimentState] | None = None,
    name: str | None = None,
) -> list[Experiment]:
    """Return the experiments that match all conditions, by ID; with `users`, those of each user in turn."""
    owners: Sequence[str | None] = users or [None]
    found = [each for owner in owners for each in client.list(states, name, labels, owner)]
    wanted = [Experiment(each) for each in found if experiment_ids is None or each.id in experiment_ids]
    return wanted[::-1] if order_by is OrderBy.DESCENDING else wanted


def get_trial(trial_id: str) -> Trial:
    """Return a trial by EXPERIMENT/TRIAL, such as "12/7". Raises UsageError if it does not exist."""
    experiment, slash, trial = str(trial_id).partition("/")
    if not (slash and experiment.isdecimal() and trial.isdecimal()):
        raise UsageError(f"get_trial: {trial_id!r} is not a trial; expected EXPERIMENT/TRIAL such as '12/7'")
    return Trial(client.get_trial(int(experiment), int(trial)))


def get_checkpoint(uuid: str) -> Checkpoint:
    """Return a checkpoint. Raises UsageError if it does not exist."""
    return Checkpoint(client.get_checkpoint(uuid))


def iter_trials_metrics(trial_ids: Sequence[str], group: str) -> Iterator[TrialMetrics]:
    """Yield the reports of several trials, trial by trial."""
    return (report for trial_id in trial_ids for report in get_trial(trial_id).iter_metrics(group))


class Determined:
    """The functions of this module as methods. The arguments have no effect: there is no server."""

    create_experiment = staticmethod(create_experiment)
    get_experiment = staticmethod(get_experiment)
    list_experiments = staticmethod(list_experiments)
    get_trial = staticmethod(get_trial)
    get_checkpoint = staticmethod(get_checkpoint)
    iter_trials_metrics = staticmethod(iter_trials_metrics)

    def __init__(self, *_arguments: Any, **_options: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(missing(f"{_MODULE}.Determined.{name}"))


class _Counterpart:
    """What experiments, trials and checkpoints have in common."""

    def reload(self) -> None:
        """Do nothing: attributes are current at each access."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(missing(f"{_MODULE}.{type(self).__name__}.{name}"))


class Experiment(_Counterpart):
    """Determined's Experiment; `hpc_det.client.Experiment` has the same and more."""

    def __init__(self, experiment: client.Experiment) -> None:
        self._own = experiment
        self.id = experiment.id
        self.activate = experiment.activate
        self.pause = experiment.pause
        self.cancel = experiment.cancel
        self.kill = experiment.kill

    def __repr__(self) -> str:
        return f"Experiment(id={self.id})"

    @property
    def state(self) -> ExperimentState:
        return self._own.state

    @property
    def name(self) -> str:
        return self._own.name

    @property
    def description(self) -> str:
        return self._own.description

    @property
    def labels(self) -> set[str]:
        return set(self._own.labels)

    @property
    def config(self) -> dict[str, Any]:
        """The effective configuration, with masked secrets."""
        return self._own.config

    def await_first_trial(self, interval: float = 0.1) -> Trial:
        """Wait until the first trial exists and return it. Raises RuntimeError if the experiment ends before."""
        while not (trials := self._own.trials()):
            if self._own.done():
                raise RuntimeError(f"experiment {self.id} ended without a trial: {self.state.value}")
            time.sleep(interval)
        return Trial(trials[0])

    def wait(self, interval: float = 5.0) -> ExperimentState:
        """Wait until the experiment has ended, and return its state. Raises ValueError while it is paused."""
        while not self._own.done():
            if self.state is ExperimentState.PAUSED:
                raise ValueError(f"experiment {self.id} is paused; activate it, or it will not end")
            time.sleep(interval)
        return self.state

    def list_trials(self) -> list[Trial]:
        """Return the trials by number."""
        return [*map(Trial, self._own.trials())]

    def iter_trials(self) -> Iterator[Trial]:
        return iter(self.list_trials())

    get_trials = list_trials

    def top_checkpoint(self, sort_by: str | None = None, smaller_is_better: bool | None = None) -> Checkpoint:
        """Return the best checkpoint. Raises ValueError if no checkpoint has a validation."""
        return _top(self._own, sort_by, smaller_is_better)

    def list_checkpoints(
        self, sort_by: str | None = None, order_by: OrderBy | None = None, max_results: int | None = None
    ) -> list[Checkpoint]:
        """Return the checkpoints, sorted by a metric of their validation if `sort_by` and `order_by` are given."""
        return _checkpoints(self._own, sort_by, order_by, max_results)


class Trial(_Counterpart):
    """Determined's Trial; `id` is a text such as "12/7"."""

    def __init__(self, trial: client.Trial) -> None:
        self._own = trial
        self.id = f"{trial.experiment.id}/{trial.id}"
        self.experiment_id = trial.experiment.id
        self.kill = trial.kill

    def __repr__(self) -> str:
        return f"Trial(id={self.id!r})"

    @property
    def state(self) -> TrialState:
        return self._own.state

    @property
    def hparams(self) -> dict[str, Any]:
        return self._own.hparams

    def get_experiment(self) -> Experiment:
        return Experiment(self._own.experiment)

    def iter_metrics(self, group: str | None = None) -> Iterator[TrialMetrics]:
        """Yield the reports of a group, or of all groups, oldest first."""
        for report in self._own.metrics(group):
            yield TrialMetrics(
                trial_id=self.id,
                trial_run_id=report["attempt"],
                steps_completed=report["batches"],
                end_time=datetime.fromtimestamp(report["time"], timezone.utc),
                metrics=report["metrics"],
                group=report["group"],
            )

    def iter_logs(
        self,
        follow: bool = False,
        *,
        head: int | None = None,
        tail: int | None = None,
        rank_ids: Sequence[int] | None = None,
        min_level: Any = None,
    ) -> Iterator[str]:
        """Yield the lines of the logs. Raises UsageError for several `rank_ids`."""
        if rank_ids and len(rank_ids) > 1:
            raise UsageError(f"iter_logs: rank_ids has {len(rank_ids)} ranks; give one, or None for all")
        rank = rank_ids[0] if rank_ids else None
        level = None if min_level is None else str(getattr(min_level, "name", min_level))
        for number, line in enumerate(self._own.logs(follow=follow, rank=rank, tail=tail, level=level), 1):
            if head is not None and number > head:
                return
            yield line

    def top_checkpoint(self, sort_by: str | None = None, smaller_is_better: bool | None = None) -> Checkpoint:
        """Return the best checkpoint. Raises ValueError if no checkpoint has a validation."""
        return _top(self._own, sort_by, smaller_is_better)

    def list_checkpoints(
        self, sort_by: str | None = None, order_by: OrderBy | None = None, max_results: int | None = None
    ) -> list[Checkpoint]:
        """Return the checkpoints, as `Experiment.list_checkpoints` does."""
        return _checkpoints(self._own, sort_by, order_by, max_results)


@dataclass(frozen=True, kw_only=True)
class TrialMetrics:
    """One metric report."""

    trial_id: str
    trial_run_id: int
    """Number of the attempt."""
    steps_completed: int
    end_time: datetime
    metrics: dict[str, Any]
    group: str


@dataclass(frozen=True, kw_only=True)
class CheckpointTrainingMetadata:
    """The training that a checkpoint is of."""

    experiment_config: dict[str, Any]
    experiment_id: int
    trial_id: str
    hparams: dict[str, Any]
    validation_metrics: dict[str, Any]


class Checkpoint(_Counterpart):
    """Determined's Checkpoint; `hpc_det.client.Checkpoint.path` needs no download."""

    def __init__(self, checkpoint: client.Checkpoint) -> None:
        self._own = checkpoint
        self.uuid = checkpoint.uuid
        self.delete = checkpoint.delete

    def __repr__(self) -> str:
        return f"Checkpoint(uuid={self.uuid!r})"

    @property
    def state(self) -> str:
        return self._own.state

    @property
    def resources(self) -> dict[str, int]:
        """Size in bytes of each file, by its name."""
        return self._own.files

    @property
    def metadata(self) -> dict[str, Any]:
        return self._own.metadata

    @property
    def training(self) -> CheckpointTrainingMetadata:
        trial = client.get_trial(self._own.experiment_id, self._own.trial_id)
        return CheckpointTrainingMetadata(
            experiment_config=shown_config(trial.experiment.folder)[0],
            experiment_id=self._own.experiment_id,
            trial_id=f"{self._own.experiment_id}/{self._own.trial_id}",
            hparams=trial.hparams,
            validation_metrics=self._own.metrics,
        )

    def download(self, path: str | Path | None = None, mode: Any = None) -> str:
        """Copy the checkpoint to `path`, by default checkpoints/UUID, and return that; an existing copy is kept."""
        target = Path(path) if path else Path("checkpoints") / self.uuid
        if not (target / "metadata.json").exists():
            self._own.download(target)
        return str(target)

    def add_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Add keys to the metadata."""
        self._own.add_metadata(metadata)

    def remove_metadata(self, keys: Sequence[str]) -> None:
        """Remove keys that were added."""
        self._own.remove_metadata(keys)

    @staticmethod
    def load_metadata(path: str | Path) -> dict[str, Any]:
        """Return the metadata in the folder of a downloaded checkpoint; empty if it has none."""
        return read_map(Path(path) / "metadata.json") or {}


def _top(of: client.Experiment | client.Trial, sort_by: str | None, smaller_is_better: bool | None) -> Checkpoint:
    if found := of.top_checkpoint(sort_by, smaller_is_better):
        return Checkpoint(found)
    raise ValueError(f"{of}: no checkpoint has a validation")


def _checkpoints(
    of: client.Experiment | client.Trial, sort_by: str | None, order_by: OrderBy | None, max_results: int | None
) -> list[Checkpoint]:
    if (sort_by is None) is not (order_by is None):
        raise AssertionError("list_checkpoints: give both sort_by and order_by, or neither")
    found = of.checkpoints()
    if sort_by is not None:
        valued = [each for each in found if isinstance(each.metrics.get(sort_by), int | float)]
        found = sorted(valued, key=lambda each: each.metrics[sort_by], reverse=order_by is OrderBy.DESCENDING)
    return [*map(Checkpoint, found)][:max_results]
