"""An experiment that lives on disk only: every file is written as its real writer does, and no job runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_det.checkpoint.committed import Committed, checksum
from hpc_det.checkpoint.staging import new_staging
from hpc_det.plan.job_plan import JobPlan
from hpc_det.requeue import Action, AttemptEnd, Cause, Decision
from hpc_det.store.files import append_line, write_atomic, write_json
from hpc_det.store.folders import ExperimentFolder, ExperimentStore, TrialFolder
from hpc_det.store.journal import Journal
from hpc_det.submit.command import Run
from hpc_det.submit.scheduler import JobState, JobStatus
from tests.plan.plans import job_plan


@dataclass(frozen=True)
class Life:
    """What happens to one experiment, step by step."""

    folder: ExperimentFolder

    @classmethod
    def submitted(cls, root: Path, *, job_id: str = "4711", name: str = "digits", **searcher: Any) -> Life:
        life = cls(ExperimentStore(root).create())
        for needed in (life.trial.logs, life.trial.checkpoints):
            needed.mkdir(parents=True)
        write_atomic(life.trial.plan, _plan(life.folder, name).to_json())
        metric = {"name": "single", "metric": "accuracy", "smaller_is_better": False, **searcher}
        write_json(life.trial.trial, {"config": {"searcher": metric, "entrypoint": "model_def:MyTrial"}})
        write_json(life.trial.job, {"job_id": job_id, "scheduler": "slurm", "submitted": time.time()})
        write_atomic(life.folder.config, f"name: {name}\n")
        return life

    @property
    def id(self) -> int:
        return self.folder.id

    @property
    def trial(self) -> TrialFolder:
        return self.folder.trial()

    @property
    def journal(self) -> Journal:
        return Journal(self.trial.journal)

    def begins(self) -> None:
        attempt = self.journal.last_attempt() + 1
        self.journal.started(attempt, "4711")
        self.job_prints(f"hpc-det: 10:00:0{attempt} attempt {attempt} begins\n")

    def ends(self, cause: Cause, action: Action, *, steps: int = 0, why: str = "", failure: str | None = None) -> None:
        end = AttemptEnd(cause=cause, steps=steps)
        self.journal.ended(self.journal.last_attempt(), end, Decision(action, why or cause.value), failure)

    def finishes(self) -> None:
        self.ends(Cause.FINISHED, Action.DONE, steps=400)

    def reports(self, kind: str, steps: int, metrics: Mapping[str, Any]) -> None:
        record = {"kind": kind, "steps": steps, "total": 400, "metrics": dict(metrics)}
        append_line(self.trial.metrics, {**record, "attempt": self.journal.last_attempt(), "time": time.time()})

    def saves(self, steps: int) -> Committed:
        staging = new_staging(self.trial.checkpoints)
        file = staging.partial / "state_dict.pth"
        file.write_bytes(b"weights")
        return staging.commit(steps, {file.name: checksum(file)})

    def job_prints(self, text: str) -> None:
        with self.trial.job_log.open("a") as log:
            log.write(text)

    def rank_prints(self, rank: int, text: str) -> None:
        path = self.trial.rank_log(self.journal.last_attempt(), rank)
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as log:
            log.write(text)


def _plan(folder: ExperimentFolder, name: str) -> JobPlan:
    trial, code = str(folder.trial().path), str(folder.code)
    return job_plan(experiment_id=folder.id, name=name, folder=trial, code=code, ranks_per_node=2, slot_type="cpu")


@dataclass
class FakeScheduler:
    """Answers with `states`, one after the other, the last for ever; each may be an event that gives the state."""

    states: list[JobState | Callable[[], JobState]] = field(default_factory=lambda: [JobState.RUNNING])
    reason: str = ""
    has_queue: bool = False
    asked: list[list[str]] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)

    def status(self, job_ids: Sequence[str], run: Run) -> dict[str, JobStatus]:
        self.asked.append(list(job_ids))
        now = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return dict.fromkeys(job_ids, JobStatus(now if isinstance(now, JobState) else now(), self.reason))

    def cancel(self, job_id: str, run: Run) -> None:
        self.cancelled.append(job_id)
        self.states = [JobState.ENDED]

    def release(self, job_id: str, run: Run) -> None:
        self.released.append(job_id)
