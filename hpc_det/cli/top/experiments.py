"""All experiments, look after look: of those that rest nothing is read again, and of the others what is new."""

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
from hpc_det.view.state import ExperimentState, ExperimentView
from hpc_det.view.summary import DAMAGED, UNREADABLE, Summary, summary
from hpc_det.view.trial_facts import TrialFacts
from hpc_det.view.watch import NO_NEWS

ROUND_S = 5.0
"""Between two looks for experiments that are new, have ended or go on. The others are looked at each time."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What is shown of an experiment; all but the summary only while it is under way."""

    summary: Summary
    waits_for: str | None = None
    """In the scheduler's words."""
    slots: int = 0
    """In use."""
    slots_wanted: int = 0
    """Of jobs that wait in the queue."""
    trial: int | None = None
    """The one that all of the following are of."""
    attempts: int = 0
    training: dict[str, Any] = field(default_factory=dict)
    validation: dict[str, Any] = field(default_factory=dict)
    losses: tuple[float, ...] = ()
    """Of all training reports."""
    gpu_use: float | None = None
    """Percent, of the GPUs of its nodes, where that is measured."""


@dataclass(frozen=True)
class Seen:
    rows: list[Row]
    """Those under way before those that are paused, and these before those that have ended; the newest first."""
    jobs: list[Job]
    job_ids: dict[str, list[str]]
    """Of all that are under way, by scheduler: what to ask about."""


class Experiments:
    def __init__(self, store: ExperimentStore, answers: Answers) -> None:
        self._store = store
        self._answers = answers
        self._resting: list[Summary] = []
        self._under_way: dict[int, UnderWay] = {}
        self._next_round = 0.0

    def look(self) -> Seen:
        if time.monotonic() >= self._next_round:
            self._go_round()
        rows, jobs = [], []
        asked: dict[str, list[str]] = {}
        for number, experiment in sorted(self._under_way.items(), reverse=True):
            job_ids: list[str] = []
            try:
                job_ids = experiment.view.job_ids()
                rows.append(experiment.row(self._answers.of(job_ids)))
            except UNREADABLE:
                rows += _damaged(experiment.view.folder)
            jobs += in_queue(number, job_ids, self._answers.of(job_ids))
            for job in experiment.view.jobs[:1]:
                asked.setdefault(job.scheduler, []).extend(job_ids)
        return Seen([*rows, *(Row(summary=each) for each in self._resting)], jobs, asked)

    def _go_round(self) -> None:
        found = experiments.look(self._store)
        shown = (each for each in found.resting if not each.archived)
        self._resting = sorted([*shown, *found.damaged], key=lambda each: (each.state.is_final, -each.id))
        self._under_way = {view.id: self._under_way.get(view.id) or UnderWay(view) for view in found.under_way}
        self._next_round = time.monotonic() + ROUND_S


class UnderWay:
    """One experiment that has not ended."""

    def __init__(self, view: ExperimentView) -> None:
        self.view = view
        self._ranks = _ranks(view)
        self._trial = 0
        self._reader: MetricsReader | None = None
        self._losses = Curve()

    def row(self, statuses: Sequence[JobStatus]) -> Row:
        """Raises one of UNREADABLE where the files are damaged or gone."""
        state, search = self.view.state(statuses), self.view.search
        reader = self._read_metrics()
        trial = TrialFacts(view=self.view, id=self._trial, is_over=state.is_final, read_metrics=reader.metrics)
        has_nodes, waits = state.has_job, not state.is_final and not search.rests
        in_queue = len(search.waiting) + (0 if has_nodes else len(search.present))
        return Row(
            summary=summary(self.view, state, None if self.view.has_many_trials else reader.metrics),
            waits_for=self.view.waits_for if state is ExperimentState.QUEUED else None,
            slots=self._ranks * len(search.present) if has_nodes else 0,
            slots_wanted=self._ranks * in_queue if waits else 0,
            trial=trial.id,
            attempts=len(trial.attempts),
            training=trial.metrics.training,
            validation=trial.metrics.validation,
            losses=tuple(self._losses.values),
            gpu_use=trial.gpu_use() if has_nodes else None,
        )

    def _read_metrics(self) -> MetricsReader:
        """Of the trial that the first worker has, or else the last one had."""
        open_now = self.view.search.open
        trial = open_now[min(open_now)].trial if open_now else self._trial or 1
        if self._reader is None or trial != self._trial:
            self._trial, self._losses = trial, Curve()
            self._reader = MetricsReader(self.view.folder.trial(trial), self.view.config["searcher"])
        for report in self._reader.read():
            if report["kind"] == "training":
                self._take(report["steps"], report["metrics"])
        return self._reader

    def _take(self, batches: int, metrics: dict[str, Any]) -> None:
        """An attempt that resumes from an earlier checkpoint makes later losses void."""
        loss = metrics.get("loss", next(iter(metrics.values()), None))
        if isinstance(loss, (int, float)):
            self._losses.cut(batches - 1)
            self._losses.append(batches, float(loss))


def _damaged(folder: ExperimentFolder) -> list[Row]:
    """Return the row of an experiment with damaged files; none where it was deleted meanwhile."""
    damaged = Summary(id=folder.id, name=DAMAGED, state=ExperimentState.ERROR)
    return [Row(summary=damaged)] if folder.config.exists() else []


def _ranks(view: ExperimentView) -> int:
    """Of each trial; none where the file is damaged, as the summary says."""
    try:
        return view.plan().world_size
    except HpcDetError:
        return 0


NEWEST_S = 5.0
"""A younger answer is not asked for again, whoever had it."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job, or an array of them, that has not ended."""

    job_id: str
    experiment: int
    state: JobState
    reason: str


class Answers:
    """The last of each job, also while a question waits for its answer."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._said: dict[str, JobStatus] = {}

    def ask(self, job_ids: Mapping[str, Sequence[str]]) -> None:
        """About jobs by scheduler. It may take as long as a scheduler takes to answer."""
        for name, its_jobs in job_ids.items():
            answers = SharedAnswers(self._root, schedulers.scheduler(name))
            self._said |= answers.news(its_jobs, run_command, NEWEST_S) or {}

    def of(self, job_ids: Sequence[str]) -> list[JobStatus]:
        return [self._said.get(job_id, NO_NEWS) for job_id in job_ids]


def in_queue(experiment: int, job_ids: Sequence[str], statuses: Sequence[JobStatus]) -> list[Job]:
    """Those that have not ended."""
    return [
        Job(job_id=job_id, experiment=experiment, state=status.state, reason=status.reason)
        for job_id, status in zip(job_ids, statuses, strict=True)
        if status.state is not JobState.ENDED
    ]
