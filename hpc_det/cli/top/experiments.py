"""The data of `hpc-det top`, read repeatedly: of active experiments what is new, of all others what has changed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_det.cli.experiment.follow import MetricsReader
from hpc_det.errors import HpcDetError
from hpc_det.schedulers import scheduler as schedulers
from hpc_det.schedulers.scheduler import JobState, JobStatus, run_command
from hpc_det.schedulers.shared_answers import SharedAnswers
from hpc_det.store.experiments import ExperimentStore
from hpc_det.store.folders import ExperimentFolder
from hpc_det.view import experiments
from hpc_det.view.metric_history import Curve
from hpc_det.view.pace import Epoch, Pace, epoch, remaining_of_search_s
from hpc_det.view.state import ExperimentState, ExperimentView
from hpc_det.view.summary import UNREADABLE, Summary, summary, unreadable
from hpc_det.view.trial_facts import TrialFacts
from hpc_det.view.trial_history import Metrics
from hpc_det.view.watch import NO_NEWS

ROUND_S = 5.0
"""Seconds between two reads of the list of experiments, to find those that are new, have ended or were continued."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """The data shown for an experiment; fields other than `summary` are set only while it is under way."""

    summary: Summary
    waits_for: str | None = None
    """The scheduler's reason why its job waits; None unless it is QUEUED."""
    slots: int = 0
    """Slots in use."""
    slots_wanted: int = 0
    """Slots of the jobs that wait in the queue."""
    trial: int | None = None
    """The trial to which the following fields refer."""
    attempts: int = 0
    """Number of attempts of the trial."""
    training: dict[str, Any] = field(default_factory=dict)
    validation: dict[str, Any] = field(default_factory=dict)
    losses: tuple[float, ...] = ()
    """The training losses, oldest first."""
    epoch: Epoch | None = None
    """The epoch of the trial; None unless searcher.max_length is in epochs."""
    samples_per_s: float | None = None
    """Throughput of the trial in its newest report; None if its training loop does not measure it."""
    batches_per_s: float | None = None
    """Speed of the trial between its two newest reports."""
    remaining_s: float | None = None
    """Seconds that the experiment still needs at its pace; None unless it is RUNNING, and before it has a pace."""
    gpu_use: float | None = None
    """Mean use of its GPUs in the last minute, in percent; None if it is not measured."""


@dataclass(frozen=True)
class Seen:
    """The result of one read of all experiments."""

    rows: list[Row]
    """The experiments: first those under way, then the paused, then the finished ones; the newest first in each."""
    jobs: list[Job]
    """The jobs of experiments under way that have not ended."""
    job_ids: dict[str, list[str]]
    """The job IDs of all experiments under way, keyed by scheduler: the jobs to query."""


class Experiments:
    """The experiments below a state root. Keeps what was read, so that the next read takes only what is new."""

    def __init__(self, store: ExperimentStore, answers: Answers) -> None:
        self._store = store
        self._answers = answers
        self._resting: list[Summary] = []
        self._under_way: dict[int, UnderWay] = {}
        self._next_round = 0.0

    def look(self) -> Seen:
        """Read what is new and return the data of all experiments."""
        if time.monotonic() >= self._next_round:
            self._go_round()
        rows, jobs = [], []
        asked: dict[str, list[str]] = {}
        for number, experiment in sorted(self._under_way.items(), reverse=True):
            job_ids: list[str] = []
            try:
                job_ids = experiment.view.job_ids()
                rows.append(experiment.row(self._answers.of(job_ids)))
            except UNREADABLE as error:  # one damaged experiment must not hide the others
                rows += _unreadable(experiment.view.folder, error)
            jobs += in_queue(number, job_ids, self._answers.of(job_ids))
            for job in experiment.view.jobs[:1]:  # all jobs of an experiment have the same scheduler
                asked.setdefault(job.scheduler, []).extend(job_ids)
        return Seen([*rows, *(Row(summary=each) for each in self._resting)], jobs, asked)

    def _go_round(self) -> None:
        """Find the experiments that are new, have ended or were continued since the last round."""
        found = experiments.look(self._store)
        shown = (each for each in found.resting if not each.archived)
        self._resting = sorted([*shown, *found.damaged], key=lambda each: (each.state.is_final, -each.id))
        self._under_way = {view.id: self._under_way.get(view.id) or UnderWay(view) for view in found.under_way}
        self._next_round = time.monotonic() + ROUND_S


class UnderWay:
    """An experiment under way, and the metrics of one of its trials."""

    def __init__(self, view: ExperimentView) -> None:
        self.view = view
        self._ranks = _ranks(view)
        self._trial = 0
        self._reader: MetricsReader | None = None
        self._losses = Curve()
        self._pace = Pace()

    def row(self, statuses: Sequence[JobStatus]) -> Row:
        """Return the experiment's row; raise one of UNREADABLE if files are damaged or missing."""
        state, search = self.view.state(statuses), self.view.search
        reader = self._read_metrics()
        trial = TrialFacts(view=self.view, id=self._trial, is_over=state.is_final, read_metrics=reader.metrics)
        has_nodes, waits = state.has_job, not state.is_final and not search.rests
        in_queue = len(search.waiting) + (0 if has_nodes else len(search.present))
        found = summary(self.view, state, None if self.view.has_many_trials else reader.metrics)
        return Row(
            summary=found,
            waits_for=self.view.waits_for if state is ExperimentState.QUEUED else None,
            slots=self._ranks * len(search.present) if has_nodes else 0,
            slots_wanted=self._ranks * in_queue if waits else 0,
            trial=trial.id,
            attempts=len(trial.attempts),
            training=trial.metrics.training,
            validation=trial.metrics.validation,
            losses=tuple(self._losses.values),
            epoch=epoch(trial.metrics.batches, trial.metrics.total, self.view.config["searcher"]),
            samples_per_s=self._pace.samples_per_s if has_nodes else None,
            batches_per_s=self._pace.newest_batches_per_s if has_nodes else None,
            remaining_s=self._remaining_s(found, reader.metrics) if state is ExperimentState.RUNNING else None,
            gpu_use=trial.gpu_use() if has_nodes else None,
        )

    def _remaining_s(self, found: Summary, metrics: Metrics) -> float | None:
        if self.view.has_many_trials:
            return remaining_of_search_s(found.progress or 0.0, self.view.worked_s(time.time()))
        return self._pace.remaining_s(metrics.batches, metrics.total)

    def _read_metrics(self) -> MetricsReader:
        """Read the new metrics of one trial: that of the first worker, or without workers the trial read last."""
        open_now = self.view.search.open
        trial = open_now[min(open_now)].trial if open_now else self._trial or 1
        if self._reader is None or trial != self._trial:
            self._trial, self._losses, self._pace = trial, Curve(), Pace()
            self._reader = MetricsReader(self.view.folder.trial(trial), self.view.config["searcher"])
        for report in self._reader.read():
            self._pace.take(report)
            if report["kind"] == "training":
                self._take(report["steps"], report["metrics"])
        return self._reader

    def _take(self, batches: int, metrics: dict[str, Any]) -> None:
        """Append the loss of a training report."""
        loss = metrics.get("loss", next(iter(metrics.values()), None))
        if isinstance(loss, (int, float)):
            self._losses.cut(batches - 1)  # an attempt that resumed from a checkpoint trains later batches again
            self._losses.append(batches, float(loss))


def _unreadable(folder: ExperimentFolder, error: Exception) -> list[Row]:
    """Return the row of an experiment whose files cannot be read, or nothing if it was deleted meanwhile."""
    return [Row(summary=unreadable(folder, error))] if folder.config.exists() else []


def _ranks(view: ExperimentView) -> int:
    """Return the world size of each trial, or 0 if the plan is damaged."""
    try:
        return view.plan().world_size
    except HpcDetError:  # the summary reports the damage
        return 0


NEWEST_S = 5.0
"""Largest age, in seconds, of an answer in the shared cache that is used instead of a query."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job, or an array of them, that has not ended."""

    job_id: str
    experiment: int
    state: JobState
    reason: str


class Answers:
    """The last known status of each job, which another thread can read while `ask` waits for the scheduler."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._statuses: dict[str, JobStatus] = {}

    def ask(self, job_ids: Mapping[str, Sequence[str]]) -> None:
        """Query the status of jobs, keyed by scheduler; blocks until the scheduler answers."""
        for name, its_jobs in job_ids.items():
            answers = SharedAnswers(self._root, schedulers.scheduler(name))
            # None: the scheduler was queried too recently, so the last answer stays
            self._statuses |= answers.news(its_jobs, run_command, NEWEST_S) or {}

    def of(self, job_ids: Sequence[str]) -> list[JobStatus]:
        """Return the last known status of each job, UNKNOWN before the first answer."""
        return [self._statuses.get(job_id, NO_NEWS) for job_id in job_ids]


def in_queue(experiment: int, job_ids: Sequence[str], statuses: Sequence[JobStatus]) -> list[Job]:
    """Return the experiment's jobs that have not ended."""
    return [
        Job(job_id=job_id, experiment=experiment, state=status.state, reason=status.reason)
        for job_id, status in zip(job_ids, statuses, strict=True)
        if status.state is not JobState.ENDED
    ]
