"""The first time that a trial is trained: what its ranks need to know is decided, and written down."""

from __future__ import annotations

import time
from pathlib import Path

from hpc_det.checkpoint.committed import newest_good
from hpc_det.errors import UsageError
from hpc_det.node.json_files import read_json, write_json
from hpc_det.search.journal import SearchJournal
from hpc_det.store.folders import TrialFolder
from hpc_det.store.journal import Journal

LONGEST_SAVE_S, SAVE_POLL_S = 120.0, 0.2
"""A trial reports before it saves: how long another one that begins with its weights waits for them."""


def prepare_trial(trial: TrialFolder, search: SearchJournal) -> None:
    """Write what the ranks need to know, the first time. Raises UsageError where that cannot be found out."""
    trial.create()
    if trial.trial.exists():
        return
    search.choose(trial.id)
    sample = search.sample(trial.id)
    warm_start = _weights(trial, sample.source)
    spec = {
        "experiment_id": trial.experiment().id,
        "trial_id": trial.id,
        "trial_seed": sample.seed,
        "hparams": sample.hparams,
        "config": search.config(trial.id),
    }
    write_json(trial.trial, {**spec, "warm_start": str(warm_start)} if warm_start else spec, private=True)


def _weights(trial: TrialFolder, source: int | None) -> Path | None:
    """The checkpoint whose weights it begins with: of trial `source` of this search, or the one that all begin with."""
    if source is None:
        told = read_json(trial.experiment().warm_start)
        return Path(told["checkpoint"]) if told else None
    begun_with = trial.experiment().trial(source)
    end = time.monotonic() + LONGEST_SAVE_S
    while Journal(begun_with.journal).open_attempt() is not None and time.monotonic() < end:
        time.sleep(SAVE_POLL_S)  # signals wait in their pipe
    found, _ = newest_good(begun_with.checkpoints)
    if found is None:
        raise UsageError(f"searcher.class: trial {trial.id} begins with trial {source}, which has no checkpoint")
    return found.path
