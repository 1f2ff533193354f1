"""The output of `trial describe`, which is also a part of `experiment describe`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from hpc_det.checkpoint.committed import Committed
from hpc_det.checkpoint.damaged import Damaged
from hpc_det.errors import printable
from hpc_det.store.folders import TrialFolder
from hpc_det.view.attempt_sentences import attempts_in_words
from hpc_det.view.formatting import batches_of, iso, labelled, number, section, settings, values_in_words
from hpc_det.view.state import ExperimentView
from hpc_det.view.trial_facts import TrialFacts
from hpc_det.view.trial_history import AttemptHistory, Metrics, hosts_of, is_complete
from hpc_det.view.watch import state as state_of

Record = dict[str, Any]


def brief(found: TrialFacts) -> Record:
    """Return the record of a trial for `experiment list-trials`."""
    # without checkpoints, whose folders would have to be read: an experiment may have a thousand trials
    return {
        "id": found.id,
        "state": found.state.value,
        "worker": found.worker,
        "job_id": found.job_id,
        "hyperparameters": found.hparams,
        "seed": found.seed,
        "batches": found.metrics.batches,
        "total_batches": found.metrics.total,
        "training": found.metrics.training or None,
        "validation": found.metrics.validation or None,
        "best": found.best,
    }


def as_json(found: TrialFacts) -> Record:
    """Return the record that `trial describe --json` prints."""
    return {
        **brief(found),
        "profile": found.verdict(),
        "checkpoints": [_checkpoint(item) for item in found.checkpoints()],
        "set_aside": [_set_aside(item) for item in found.set_aside()],
        "attempts": [_attempt(item) for item in _with_nodes(found)],
    }


def of(trial: TrialFolder) -> TrialFacts:
    """Return the facts of a trial, after determining the state of its experiment."""
    view = ExperimentView(trial.experiment())
    return TrialFacts(view=view, id=trial.id, is_over=state_of(view).is_final)


def in_words(found: TrialFacts) -> str:
    """Return the trial as text for people."""
    heading = [f"Trial {found.folder.experiment().id}/{found.id}", *_rows(found)]
    return "\n\n".join("\n".join(lines) for lines in [heading, *sections(found)] if lines)


def _rows(found: TrialFacts) -> Iterator[str]:
    rows = {
        "State": found.state.value,
        "Progress": batches_of(found.metrics.batches, found.metrics.total),
        "Worker": f"{'-' if found.worker is None else found.worker}, job {found.job_id or '-'}",
        "Hparams": settings(found.hparams),
        "Seed": str(found.seed),
        "Folder": str(found.folder.path),
        **({"Checkpoint": checkpoint} if (checkpoint := found.checkpoint()) else {}),
    }
    yield from labelled(rows)


def sections(found: TrialFacts, known: str = "") -> list[list[str]]:
    """Return the lines of each section: attempts, metrics, profile, checkpoints, set aside. A section may be empty.

    `known`: a text that is printed before; causes in it are not repeated.
    """
    attempts = attempts_in_words(_with_nodes(found), time.time(), is_over=found.is_over, known=known)
    verdict = found.verdict()
    return [
        section("Attempts", list(attempts)),
        section("Metrics", list(_metrics(found.metrics))),
        section("Profile", [verdict] if verdict else []),
        section("Checkpoints", [_checkpoint_in_words(item) for item in found.checkpoints()]),
        section("Set aside", [set_aside_in_words(item) for item in found.set_aside()]),
    ]


def _with_nodes(found: TrialFacts) -> list[AttemptHistory]:
    """Return the attempts with their nodes, also of an attempt that has not ended."""
    return [replace(item, nodes=hosts_of(found.folder, item)) for item in found.attempts]


def _metrics(metrics: Metrics) -> Iterator[str]:
    for name, values in (("last training", metrics.training), ("last validation", metrics.validation)):
        if values:
            yield f"{name}: {values_in_words(values)}"
    if best := metrics.best:
        yield f"best validation: {best.metric} {number(best.value)} at batch {best.batches}"
    elif lacking := metrics.lacking_metric:
        yield f"best validation: not known: {lacking}"


def _checkpoint_in_words(item: Committed) -> str:
    lacks = "" if _is_complete(item) else ", files were removed" if item.removed else ", files are missing or truncated"
    return f"{item.uuid} at batch {item.steps}, {iso(item.time)}{lacks}"


def _checkpoint(item: Committed) -> Record:
    complete = _is_complete(item)
    return {"uuid": item.uuid, "batches": item.steps, "time": iso(item.time), "complete": complete}


def set_aside_in_words(item: Damaged) -> str:
    """Return one line about a damaged checkpoint that was set aside."""
    batch = "an unknown batch" if item.steps is None else f"batch {item.steps}"
    return printable(f"{item.uuid} at {batch}, damaged: {'; '.join(item.problems)}; kept as {item.place}")


def _set_aside(item: Damaged) -> Record:
    known = asdict(item)
    steps = known.pop("steps")
    return {**known, "batches": steps, "time": iso(item.time)}


def _attempt(item: AttemptHistory) -> Record:
    return {**asdict(item), "started": iso(item.started), "ended": iso(item.ended) if item.ended else None}


def _is_complete(item: Committed) -> bool:
    return not item.removed and is_complete(item)
