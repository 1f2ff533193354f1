"""A whole search on disk: every file is written as its real writer does, at simulated times."""

from __future__ import annotations

import heapq
import math
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from hpc_det.launch.job.worker import prepare_trial
from hpc_det.node.json_files import append_line, read_json, write_json
from hpc_det.requeue import Action, AttemptEnd, Cause, Decision
from hpc_det.search.journal import SearchJournal
from hpc_det.search.method import Work
from hpc_det.store.folders import ExperimentFolder, TrialFolder
from hpc_det.store.journal import Journal
from hpc_det.store.metrics import BEGINS
from hpc_det.store.save_times import write_save
from tests.checkpoint.saved import save
from tests.cli.life import LENGTH, Life

BEGAN = time.mktime((2026, 11, 20, 10, 0, 0, 0, 0, -1))
HYPERPARAMETERS: dict[str, Any] = {
    "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1},
    "width": {"type": "int", "minval": 16, "maxval": 256},
    "dropout": {"type": "double", "minval": 0.0, "maxval": 0.6},
    "optimizer": {"type": "categorical", "vals": ["adam", "sgd", "lion"]},
    "layers": 4,
}
EVERY, VALIDATES_EVERY = 5, 25
"""Batches between reports, and between validations with a save."""
HALVING = {"name": "async_halving", "num_rungs": 3, "divisor": 4, "stop_once": False}
ADAPTIVE: dict[str, Any] = {
    "name": "adaptive_asha",
    "mode": "standard",
    "max_rungs": 3,
    "divisor": 4,
    "bracket_rungs": [],
    "stop_once": False,
}


def lived(root: Path, trials: int, workers: int = 6, **searcher: Any) -> ExperimentFolder:
    """Write a search with preemptions and failures, whose accuracy depends on hyperparameters; return its folder."""
    settings = {**(searcher or HALVING), "max_trials": trials, "max_concurrent_trials": 0}
    past = _Past()
    with mock.patch("time.time", past.moment):
        life = Life.submitted(root, workers=workers, **settings)
        config = read_json(life.folder.effective) or {}
        write_json(life.folder.effective, {**config, "hyperparameters": HYPERPARAMETERS})
        _Search(life.folder, SearchJournal(life.folder), past).play(workers)
    return life.folder


@dataclass
class _Past:
    now: float = BEGAN
    draws: random.Random = field(default_factory=lambda: random.Random(7))

    def moment(self) -> float:
        return self.now

    def passes(self, least_s: float, most_s: float) -> float:
        """Advance the clock by a random number of seconds in this range, and return it."""
        seconds = self.draws.uniform(least_s, most_s)
        self.now += seconds
        return seconds


@dataclass
class _Search:
    folder: ExperimentFolder
    journal: SearchJournal
    past: _Past
    saved: dict[int, int] = field(default_factory=dict)
    """Batches in the newest checkpoint of each trial."""

    def play(self, workers: int) -> None:
        """Let workers take turns, an attempt each; preempted ones return later."""
        turns = [(BEGAN + 20 + 7.0 * worker, worker) for worker in range(workers)]
        for _, worker in turns:
            self.journal.ask(worker, f"4711_{worker}")
        while turns:
            self.past.now, worker = heapq.heappop(turns)
            if work := self.journal.state().open.get(worker):
                waits_s = self._attempt(worker, work)
                heapq.heappush(turns, (self.past.now + waits_s, worker))
            else:
                self.journal.leave(worker)

    def _attempt(self, worker: int, work: Work) -> float:
        """Train to the end of the work or of the attempt; return the worker's waiting time in the queue, in seconds."""
        trial, end = self.folder.trial(work.trial), work.until or LENGTH
        prepare_trial(trial, self.journal)
        journal = Journal(trial.journal)
        number, first = journal.last_attempt() + 1, self.saved.get(trial.id, 0)
        journal.started(number, f"4711_{worker}", worker)
        self.past.passes(6, 14)
        _append(trial, number, {"kind": BEGINS, "trained": first, "validated": first or -1})
        chance = self.past.draws.random()
        fails, is_preempted = first < end and chance < 0.06, first < end and 0.06 <= chance < 0.18
        last = self.past.draws.randint(first + 1, end) if fails or is_preempted else end
        self._train(trial, number, first, last, fails=fails)
        self.past.passes(1, 3)
        if fails:
            _ends(journal, number, Cause.FAILED, Action.RESTART, self.saved.get(trial.id, 0))
            return 0.5
        if is_preempted:
            _ends(journal, number, Cause.PREEMPTED, Action.REQUEUE, last)
            return self.past.draws.uniform(60, 240)
        self.journal.report(worker, work, _metrics(trial, end)["accuracy"])
        if self.journal.state().method.is_closed(trial.id):
            _ends(journal, number, Cause.FINISHED, Action.DONE, end)
        else:
            _ends(journal, number, Cause.WAITING, Action.WAIT, end)
        return 0.1

    def _train(self, trial: TrialFolder, attempt: int, first: int, last: int, *, fails: bool) -> None:
        batch_s = self.past.draws.uniform(0.3, 0.6)
        for batch in sorted({*range(first + EVERY, last, EVERY), last} - {first}):
            self.past.passes(0.9 * EVERY * batch_s, 1.2 * EVERY * batch_s)
            _reports(trial, attempt, "training", batch, {"loss": _metrics(trial, batch)["loss"]})
            if batch % VALIDATES_EVERY == 0 or batch == last:
                took_s = self.past.passes(1, 2)
                _reports(trial, attempt, "validation", batch, _metrics(trial, batch), seconds=took_s)
            if batch % VALIDATES_EVERY == 0 and batch != last:
                self._save(trial, batch)
        if not fails:
            self._save(trial, last)

    def _save(self, trial: TrialFolder, batch: int) -> None:
        began, took_s = self.past.now, self.past.passes(1, 3)
        write_save(trial.saves, save(took_s, took_s, batches=batch, began=began))
        self.saved[trial.id] = batch


def _ends(journal: Journal, number: int, cause: Cause, action: Action, steps: int) -> None:
    failure = "rank 1 on node2: RuntimeError: CUDA error: unspecified launch failure" if cause is Cause.FAILED else None
    journal.ended(number, AttemptEnd(cause=cause, steps=steps), Decision(action, cause.value), failure)


def _reports(
    trial: TrialFolder, attempt: int, kind: str, batch: int, metrics: dict[str, float], **facts: float
) -> None:
    _append(trial, attempt, {"kind": kind, "steps": batch, "total": LENGTH, "metrics": metrics, **facts})


def _append(trial: TrialFolder, attempt: int, record: dict[str, Any]) -> None:
    append_line(trial.metrics, {**record, "attempt": attempt, "time": time.time()}, durable=False)


def _metrics(trial: TrialFolder, batch: int) -> dict[str, float]:
    """Return metrics that depend on the hyperparameters, with noise."""
    hparams = (read_json(trial.trial) or {})["hparams"]
    off = abs(math.log10(hparams["lr"]) + 2.3) / 2 + abs(hparams["dropout"] - 0.2) / 3
    off += {"adam": 0.0, "lion": 0.06, "sgd": 0.2}[hparams["optimizer"]]
    noise = random.Random(f"{trial.id}/{batch}").gauss(0, 0.012)
    learnt = 1 - math.exp(-batch / (60 + 90 * off))
    accuracy = 0.1 + (0.86 - 0.5 * min(off, 1.2)) * learnt + noise
    return {"accuracy": accuracy, "loss": 2.4 * (1.05 - accuracy) ** 2 + abs(noise)}
