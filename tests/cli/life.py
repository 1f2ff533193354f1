"""A simulated experiment on disk: every file is written as its real writer does, and no job runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from hpc_det.checkpoint.committed import Committed, checksum
from hpc_det.checkpoint.staging import Staging
from hpc_det.launch.job.worker import prepare_trial
from hpc_det.node.files import write_atomic
from hpc_det.node.json_files import append_line, write_json
from hpc_det.requeue import Action, AttemptEnd, Cause, Decision
from hpc_det.schedulers.scheduler import JobState, JobStatus, Run
from hpc_det.search.journal import SearchJournal
from hpc_det.search.method import Exit, Work
from hpc_det.store.experiments import ExperimentStore
from hpc_det.store.folders import ExperimentFolder, TrialFolder
from hpc_det.store.journal import Journal
from hpc_det.store.metrics import BEGINS
from tests.plan.plans import job_plan

SINGLE = {"name": "single", "metric": "accuracy", "smaller_is_better": False, "max_length": {"batches": 400}}
LENGTH = 400


def random_search(trials: int) -> dict[str, Any]:
    return {"name": "random", "max_trials": trials, "max_concurrent_trials": 0}


def halving(trials: int) -> dict[str, Any]:
    """Return a searcher with rungs at 100 and 400 batches, which promotes one of four trials."""
    return {"name": "async_halving", "max_trials": trials, "num_rungs": 2, "divisor": 4, "stop_once": False}


@dataclass(frozen=True)
class Life:
    """Simulates the events of one experiment, step by step. Its jobs are an array with one job per worker."""

    folder: ExperimentFolder
    job_id: str
    workers: int

    @classmethod
    def submitted(
        cls, root: Path, *, job_id: str = "4711", title: str = "digits", workers: int = 1, **searcher: Any
    ) -> Life:
        life = cls(ExperimentStore(root).create(), job_id, workers)
        for needed in (life.folder.search, life.folder.jobs):
            needed.mkdir(parents=True)
        config = {
            "name": title,
            "entrypoint": "model_def:MyTrial",
            "searcher": {**SINGLE, **searcher},
            "hyperparameters": {"width": 64, "lr": {"type": "double", "minval": 0.0, "maxval": 1.0}},
            "reproducibility": {"experiment_seed": 7},
            "checkpoint_storage": {"save_experiment_best": 0, "save_trial_best": 1, "save_trial_latest": 1},
        }
        write_json(life.folder.effective, config)
        plan = job_plan(
            experiment_id=life.id, name=title, folder=str(life.folder.path), ranks_per_node=2, slot_type="cpu"
        )
        write_atomic(life.folder.plan, plan.to_json())
        life.search.submitted(first=0, count=workers, stay=False)
        record = {"job_id": job_id, "scheduler": "slurm", "submitted": time.time()}
        write_json(life.folder.job(), {**record, "first": 0, "workers": workers})
        write_atomic(life.folder.config, f"name: {title}\n")
        return life

    @property
    def id(self) -> int:
        return self.folder.id

    @property
    def trial(self) -> TrialFolder:
        """The folder of the first trial."""
        return self.folder.trial()

    @property
    def journal(self) -> Journal:
        """The journal of the first trial."""
        return Journal(self.trial.journal)

    @property
    def search(self) -> SearchJournal:
        return SearchJournal(self.folder)

    # --- events of a job, its workers and the ranks

    def begins(self, worker: int = 0, job: str | None = None) -> None:
        """Start the worker's job, for the first time or again."""
        work = self.search.ask(worker, job or self._job_of(worker))
        assert work, worker
        self._begins_attempt(worker, work)

    def ends(
        self,
        cause: Cause,
        action: Action,
        *,
        worker: int = 0,
        steps: int = 0,
        why: str = "",
        failure: str | None = None,
        how: Exit | None = None,
    ) -> None:
        """End the attempt before a report to the search. `how`: the reported exit, if not that of _HOW."""
        trial = self.search.state().open[worker].trial
        self._ends_attempt(trial, cause, action, steps, why, failure)
        if how := how or _HOW.get((cause, action)) or _HOW.get((None, action)):
            self._goes_on(worker, self.search.end(worker, trial, how))

    def reaches(self, value: float, *, worker: int = 0) -> None:
        """Report that the trial was trained to the requested length; the worker obeys the answer of the search."""
        search = self.search
        work = search.state().open[worker]
        further = search.report(worker, work, value)
        if further and further.trial == work.trial:
            return
        end = Cause.FINISHED if search.state().method.is_closed(work.trial) else Cause.WAITING
        self._ends_attempt(work.trial, end, Action.DONE if end is Cause.FINISHED else Action.WAIT, work.until or 0)
        self._goes_on(worker, further)

    def finishes(self, worker: int = 0) -> None:
        self.reaches(0.9, worker=worker)

    def reports(self, kind: str, steps: int, metrics: Mapping[str, Any], *, trial: int = 1, **facts: float) -> None:
        folder = self.folder.trial(trial)
        record = {"kind": kind, "steps": steps, "total": LENGTH, "metrics": dict(metrics), **facts}
        attempt = Journal(folder.journal).last_attempt()
        append_line(folder.metrics, {**record, "attempt": attempt, "time": time.time()})

    def trains_from(self, steps: int, *, trial: int = 1) -> None:
        """Record that the attempt begins with a checkpoint of `steps` batches."""
        folder = self.folder.trial(trial)
        attempt = Journal(folder.journal).last_attempt()
        record = {"kind": BEGINS, "trained": steps, "validated": steps, "attempt": attempt, "time": time.time()}
        append_line(folder.metrics, record)

    def saves(self, steps: int, *, trial: int = 1, uuid: str | None = None) -> Committed:
        staging = Staging(self.folder.trial(trial).checkpoints, uuid or str(uuid4()))
        staging.partial.mkdir()
        file = staging.partial / "state_dict.pth"
        file.write_bytes(b"weights")
        return staging.commit(steps, {file.name: checksum(file)})

    # --- output

    def job_prints(self, text: str, *, job: str = "1") -> None:
        """Append to the log of the job, outside of any attempt."""
        _append(self.folder.jobs / f"{job}.log", text)

    def attempt_prints(self, text: str, *, trial: int = 1) -> None:
        _append(self.folder.trial(trial).job_log, text)

    def rank_prints(self, rank: int, text: str, *, trial: int = 1) -> None:
        folder = self.folder.trial(trial)
        path = folder.rank_log(Journal(folder.journal).last_attempt(), rank)
        path.parent.mkdir(exist_ok=True)
        _append(path, text)

    def _job_of(self, worker: int) -> str:
        return self.job_id if self.workers == 1 else f"{self.job_id}_{worker}"

    def _begins_attempt(self, worker: int, work: Work) -> None:
        self.job_prints(f"hpc-det: 10:00:00 worker {worker}: trial {work.trial} until {work.until}\n")
        folder = self.folder.trial(work.trial)
        prepare_trial(folder, self.search)
        journal = Journal(folder.journal)
        attempt = journal.last_attempt() + 1
        journal.started(attempt, self.search.state().present[worker], worker)
        self.attempt_prints(f"hpc-det: 10:00:0{attempt} attempt {attempt} begins\n", trial=work.trial)

    def _ends_attempt(
        self, trial: int, cause: Cause, action: Action, steps: int, why: str = "", failure: str | None = None
    ) -> None:
        journal = Journal(self.folder.trial(trial).journal)
        decision = Decision(action, why or cause.value)
        journal.ended(journal.last_attempt(), AttemptEnd(cause=cause, steps=steps), decision, failure)

    def _goes_on(self, worker: int, work: Work | None) -> None:
        if work:
            self._begins_attempt(worker, work)
        else:
            self.search.leave(worker)


_HOW = {
    (Cause.CANCELLED, Action.DONE): Exit.CANCELLED,
    (None, Action.DONE): Exit.COMPLETED,
    (None, Action.GIVE_UP): Exit.FAILED,
}
"""(cause, action) -> the exit that a worker reports to the search; other ends are not reported."""


def _append(path: Path, text: str) -> None:
    with path.open("a") as log:
        log.write(text)


@dataclass
class FakeScheduler:
    """Returns the next of `states` at each call, then repeats the last one. Items may be functions that return one."""

    states: list[JobState | Callable[[], JobState]] = field(default_factory=lambda: [JobState.RUNNING])
    reason: str = ""
    has_queue: bool = False
    asked: list[list[str]] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    withdrawn: list[str] = field(default_factory=list)

    def status(self, job_ids: Sequence[str], run: Run) -> dict[str, JobStatus]:
        self.asked.append(list(job_ids))
        now = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        found = now if isinstance(now, JobState) else now()
        held = found is JobState.HELD
        status = {job_id: JobStatus(found, self.reason, (job_id,) if held else ()) for job_id in job_ids}
        return {**status, **{job_id: JobStatus(JobState.ENDED) for job_id in job_ids if job_id in self.cancelled}}

    def cancel(self, job_id: str, run: Run) -> None:
        self.cancelled.append(job_id)

    def release(self, job_id: str, run: Run) -> None:
        self.released.append(job_id)

    def withdraw(self, job_id: str, run: Run) -> None:
        self.withdrawn.append(job_id)


def tear(path: Path, content: bytes | None) -> None:
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
