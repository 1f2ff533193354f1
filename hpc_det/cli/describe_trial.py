"""hpc-det trial describe, and what `experiment describe` says of each trial."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from hpc_det.checkpoint.committed import Committed, committed
from hpc_det.checkpoint.damaged import Damaged, damaged_ones
from hpc_det.errors import printable
from hpc_det.store.folders import TrialFolder
from hpc_det.view.formatting import batches_of, iso, labelled, number, section, values_in_words
from hpc_det.view.performance.profile import profile
from hpc_det.view.state import ExperimentState, ExperimentView
from hpc_det.view.summary import best_of_one
from hpc_det.view.trial_history import SPEC, AttemptHistory, Metrics, attempt_in_words, is_complete, read_tolerantly
from hpc_det.view.trials import TrialState, attempts_of, trial_state
from hpc_det.view.watch import state as state_of

Record = dict[str, Any]
MOST_OF_PROFILE = 32 * 2**20
"""Bytes: two seconds. `trial profile` reads any number of them."""


@dataclass(frozen=True, kw_only=True)
class TrialFacts:
    """All that is known of a trial."""

    folder: TrialFolder
    view: ExperimentView
    """Of its experiment."""
    state: TrialState
    worker: int | None
    """Who trains it now."""
    hparams: dict[str, Any]
    seed: int
    metrics: Metrics
    attempts: list[AttemptHistory]
    is_over: bool
    """Nothing of the experiment runs any more."""

    @property
    def id(self) -> int:
        return self.folder.id

    @property
    def job_id(self) -> str | None:
        """Of its last attempt."""
        return self.attempts[-1].job_id if self.attempts else None

    def checkpoints(self) -> list[Committed]:
        return committed(self.folder.checkpoints)

    def set_aside(self) -> list[Damaged]:
        return damaged_ones(self.folder.checkpoints)

    def verdict(self) -> str | None:
        """Of its profile; None where it has none, or one that takes more than a moment to read."""
        size = sum(file.stat().st_size for file in self.folder.profile.glob("*.jsonl"))
        if not 0 < size <= MOST_OF_PROFILE:
            return None
        found = profile(self.view, self.folder)
        return f"{found['verdict']}: {found['why']}"

    def as_json(self) -> Record:
        return {
            **self.brief(),
            "profile": self.verdict(),
            "checkpoints": [_checkpoint(item) for item in self.checkpoints()],
            "set_aside": [_set_aside(item) for item in self.set_aside()],
            "attempts": [_attempt(item) for item in self.attempts],
        }

    def brief(self) -> Record:
        """Without a look at the checkpoints: an experiment may have a thousand trials."""
        return {
            "id": self.id,
            "state": self.state.value,
            "worker": self.worker,
            "job_id": self.job_id,
            "hyperparameters": self.hparams,
            "seed": self.seed,
            "batches": self.metrics.batches,
            "total_batches": self.metrics.total,
            "training": self.metrics.training or None,
            "validation": self.metrics.validation or None,
            "best": best_of_one(self.metrics, self.id),
        }


def facts(view: ExperimentView, number: int, state: ExperimentState) -> TrialFacts:
    """Of a trial that the search has created; `state` is the experiment's."""
    folder, search = view.folder.trial(number), view.search
    attempts = attempts_of(search, folder, is_over=state.is_final)
    hparams, seed = _sample(view, folder)
    return TrialFacts(
        folder=folder,
        view=view,
        state=trial_state(search, number, attempts, is_over=state.is_final),
        worker=None if state.is_final else search.trials[number].worker,
        hparams=hparams,
        seed=seed,
        metrics=Metrics.read(folder, view.config["searcher"]),
        attempts=attempts,
        is_over=state.is_final,
    )


def _sample(view: ExperimentView, folder: TrialFolder) -> tuple[dict[str, Any], int]:
    """What its worker has written; before that, what it is going to write."""
    if written := read_tolerantly(folder.trial, SPEC):
        return written["hparams"], written["trial_seed"]
    sample = view.sample(folder.id)
    return sample.hparams, sample.seed


def of(trial: TrialFolder) -> TrialFacts:
    view = ExperimentView(trial.experiment())
    return facts(view, trial.id, state_of(view))


def in_words(found: TrialFacts) -> str:
    heading = [f"Trial {found.folder.experiment().id}/{found.id}", *_rows(found)]
    return "\n\n".join("\n".join(lines) for lines in [heading, *sections(found)] if lines)


def _rows(found: TrialFacts) -> Iterator[str]:
    rows = {
        "State": found.state.value,
        "Progress": batches_of(found.metrics.batches, found.metrics.total),
        "Worker": f"{'-' if found.worker is None else found.worker}, job {found.job_id or '-'}",
        "Hparams": json.dumps(found.hparams),
        "Seed": str(found.seed),
        "Folder": str(found.folder.path),
    }
    yield from labelled(rows)


def sections(found: TrialFacts) -> list[list[str]]:
    """Attempts, metrics, the profile's verdict, and checkpoints."""
    now = time.time()
    verdict = found.verdict()
    return [
        section("Attempts", [attempt_in_words(item, now, is_over=found.is_over) for item in found.attempts]),
        section("Metrics", list(_metrics(found.metrics))),
        section("Profile", [verdict] if verdict else []),
        section("Checkpoints", [_checkpoint_in_words(item) for item in found.checkpoints()]),
        section("Set aside", [set_aside_in_words(item) for item in found.set_aside()]),
    ]


def _metrics(metrics: Metrics) -> Iterator[str]:
    for name, values in (("last training", metrics.training), ("last validation", metrics.validation)):
        if values:
            yield f"{name}: {values_in_words(values)}"
    if best := metrics.best:
        yield f"best validation: {best.metric} {number(best.value)} at batch {best.batches}"


def _checkpoint_in_words(item: Committed) -> str:
    damage = ", files were removed" if item.removed else ", files are missing or cut"
    damage = "" if _is_complete(item) else damage
    return f"{item.uuid} at batch {item.steps}, {iso(item.time)}{damage}"


def _checkpoint(item: Committed) -> Record:
    complete = _is_complete(item)
    return {"uuid": item.uuid, "batches": item.steps, "time": iso(item.time), "complete": complete}


def set_aside_in_words(item: Damaged) -> str:
    batch = "an unknown batch" if item.steps is None else f"batch {item.steps}"
    return printable(f"{item.uuid} at {batch}, damaged: {'; '.join(item.problems)}; kept as {item.place}")


def _set_aside(item: Damaged) -> Record:
    known = asdict(item)
    return {**known, "batches": known.pop("steps"), "time": iso(item.time)}


def _attempt(item: AttemptHistory) -> Record:
    return {**asdict(item), "started": iso(item.started), "ended": iso(item.ended) if item.ended else None}


def _is_complete(item: Committed) -> bool:
    return not item.removed and is_complete(item)
