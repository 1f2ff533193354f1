"""The metadata of checkpoints: facts that the trial has saved, and keys that users add later.

    checkpoints/UUID/metadata.json   versions and batches, and what callbacks add; saved with the checkpoint
    checkpoint-metadata/UUID.json    the keys that users add, in the trial's folder

Users' keys are not in the checkpoint's folder: the manifest has a checksum of each file there, the folder may exist
only in an object store, and it may be on a scratch file system that is cleaned up.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from hpc_det.checkpoint.committed import METADATA, Committed
from hpc_det.errors import UsageError
from hpc_det.node.files import make_folder
from hpc_det.node.json_files import DamagedFile, read_map, write_json
from hpc_det.store.folders import TrialFolder


def saved_metadata(checkpoint: Committed) -> dict[str, Any]:
    """Return the metadata that the trial has saved; only `steps_completed` if the file is missing or damaged."""
    known: dict[str, Any] = {"steps_completed": checkpoint.steps}
    try:
        return {**(read_map(checkpoint.path / METADATA) or {}), **known}
    except (DamagedFile, OSError):
        return known


def all_metadata(trial: TrialFolder, checkpoint: Committed) -> dict[str, Any]:
    """Return the saved metadata and the keys that users have added. Raises DamagedFile."""
    return {**_added(trial, checkpoint), **saved_metadata(checkpoint)}


def add_metadata(trial: TrialFolder, checkpoint: Committed, added: Mapping[str, Any]) -> None:
    """Add keys, or replace those that a user has added. Raises UsageError if a key is saved or a value is not JSON."""
    _insist_on_users(checkpoint, added)
    try:
        json.dumps(added, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"checkpoint {checkpoint.uuid}: metadata cannot be written as JSON: {error}") from None
    _write(trial, checkpoint, {**_added(trial, checkpoint), **added})


def remove_metadata(trial: TrialFolder, checkpoint: Committed, keys: Iterable[str]) -> None:
    """Remove keys that users have added; other keys may be missing. Raises UsageError if a key is a saved one."""
    gone = {*keys}
    _insist_on_users(checkpoint, gone)
    _write(trial, checkpoint, {key: value for key, value in _added(trial, checkpoint).items() if key not in gone})


def _added(trial: TrialFolder, checkpoint: Committed) -> dict[str, Any]:
    return read_map(trial.checkpoint_metadata(checkpoint.uuid)) or {}


def _write(trial: TrialFolder, checkpoint: Committed, metadata: Mapping[str, Any]) -> None:
    path = trial.checkpoint_metadata(checkpoint.uuid)
    make_folder(path.parent)
    write_json(path, dict(metadata))


def _insist_on_users(checkpoint: Committed, keys: Collection[str]) -> None:
    """Raise UsageError with each key that the trial has saved, or that is not a text."""
    saved = saved_metadata(checkpoint)
    problems = [
        f"checkpoint {checkpoint.uuid}: metadata key {key!r} is not a text" for key in keys if type(key) is not str
    ]
    problems += [
        f"checkpoint {checkpoint.uuid}: metadata key {key!r} was saved with the checkpoint and cannot be changed; "
        f"choose another key"
        for key in keys
        if key in saved
    ]
    if problems:
        raise UsageError(problems)
