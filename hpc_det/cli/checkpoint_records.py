"""What commands say of checkpoints: a row of a list, and all that is known of one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from hpc_det.checkpoint.storage import is_here
from hpc_det.cli.output import Column, Record
from hpc_det.errors import HpcDetError
from hpc_det.store.folders import ExperimentFolder, TrialFolder
from hpc_det.view.checkpoints import (
    StoredCheckpoint,
    best_first,
    effective_config,
    of_experiment,
    of_trial,
    set_aside_in,
)
from hpc_det.view.formatting import NONE, iso, labelled, number, size, values_in_words
from hpc_det.view.trial_history import read_tolerantly


def listed(experiment: ExperimentFolder, best: int | None) -> list[dict[str, Any]]:
    """`best`: only so many, by the searcher's metric."""
    config = effective_config(experiment)
    aside = [found for trial in experiment.trials() for found in set_aside_in(trial, config)]
    return _records(of_experiment(experiment), aside, config["searcher"], best)


def listed_of_trial(trial: TrialFolder, best: int | None) -> list[dict[str, Any]]:
    config = effective_config(trial.experiment())
    return _records(of_trial(trial, config), set_aside_in(trial, config), config["searcher"], best)


def _records(
    found: Sequence[StoredCheckpoint], set_aside: Sequence[StoredCheckpoint], searcher: Record, best: int | None
) -> list[dict[str, Any]]:
    metric = searcher["metric"]
    if best is not None:
        found, set_aside = best_first(found, metric, smaller_is_better=searcher["smaller_is_better"])[:best], []
    return [_record(item, metric) for item in (*found, *set_aside)]


def _record(item: StoredCheckpoint, metric: str) -> dict[str, Any]:
    return {
        "trial": item.trial.id,
        "batches": item.checkpoint.steps,
        "state": item.state,
        "metric": metric,
        "value": item.metrics.get(metric),
        "uuid": item.uuid,
        "size_bytes": item.checkpoint.size_bytes,
        "time": iso(item.checkpoint.time),
    }


def _validation(record: Record) -> str:
    return NONE if record["value"] is None else f"{record['metric']} {number(record['value'])}"


KEYS = "trial batches state metric value uuid size_bytes time"
"""Of a record."""
COLUMNS = (
    Column("TRIAL", lambda record: str(record["trial"])),
    Column("BATCHES", lambda record: str(record["batches"])),
    Column("STATE", itemgetter("state")),
    Column("VALIDATION", _validation),
    Column("UUID", itemgetter("uuid")),
    Column("SIZE", lambda record: size(record["size_bytes"])),
)


def described(item: StoredCheckpoint, *, verify: bool) -> dict[str, Any]:
    checkpoint = item.checkpoint
    spec = read_tolerantly(item.trial.trial) or {}
    return {
        "uuid": item.uuid,
        "experiment": item.trial.experiment().id,
        "trial": item.trial.id,
        "batches": checkpoint.steps,
        "state": item.state,
        "time": iso(checkpoint.time),
        "size_bytes": checkpoint.size_bytes,
        "places": [item.set_aside.place] if item.set_aside else item.storage.places(item.uuid),
        "validation": item.metrics or None,
        "hyperparameters": spec.get("hparams"),
        "files": [{"name": name, "size_bytes": entry.size} for name, entry in sorted(checkpoint.files.items())],
        "removed": sorted(checkpoint.removed),
        "damage": _damage(item) if verify else None,
    }


def insist_on_whole(records: Sequence[Record]) -> None:
    """Raises HpcDetError where a verified one is damaged."""
    problems = [
        f"checkpoint {record['uuid']}: damaged: {problem}" for record in records for problem in record["damage"] or []
    ]
    if problems:
        raise HpcDetError(problems)


def _damage(item: StoredCheckpoint) -> list[str]:
    """Raises HpcDetError for one that is in a store alone."""
    if item.set_aside:
        return item.set_aside.problems
    if not is_here(item.checkpoint.path):
        raise HpcDetError(
            f"checkpoint {item.uuid}: lies in {', '.join(item.storage.places(item.uuid))} alone; "
            f"`hpc-det checkpoint download {item.uuid}` verifies it on the way"
        )
    return [*item.checkpoint.damage(), *item.checkpoint.code_damage()]


def in_words(record: Record) -> str:
    files = [f"  {size(file['size_bytes']):>10}  {file['name']}" for file in record["files"]]
    rows = {
        "Trial": f"{record['experiment']}/{record['trial']}",
        "Batches": str(record["batches"]),
        "State": record["state"],
        "Saved": record["time"],
        "Size": size(record["size_bytes"]),
        "Validation": values_in_words(record["validation"] or {}) or "none at these batches",
        "Hparams": json.dumps(record["hyperparameters"]),
        "Place": ", ".join(record["places"]),
        **({"Removed": ", ".join(record["removed"])} if record["removed"] else {}),
        **({} if record["damage"] is None else {"Damage": "; ".join(record["damage"]) or "none"}),
    }
    return "\n".join([f"Checkpoint {record['uuid']}", *labelled(rows), "  Files:", *files])
