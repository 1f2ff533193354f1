"""The files with which a checkpoint can be used outside its experiment: the code, and the arguments of the trial.

code/             the experiment's code as the trial's first attempt found it
load_data.json    trial class, hyperparameters, effective configuration (secrets masked), seed and ids
metadata.json     versions, batches trained; callbacks may add to it
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from hpc_det.checkpoint.committed import CODE, LOAD_DATA, METADATA, checksum, committed_at
from hpc_det.checkpoint.damaged import repair_code
from hpc_det.checkpoint.seals import FileEntry
from hpc_det.config.secrets import masked
from hpc_det.core.progress import PROGRESS
from hpc_det.errors import UsageError
from hpc_det.node.disk import temporary_beside
from hpc_det.node.files import flush_file, flush_folder, flush_tree, make_folders
from hpc_det.node.json_files import read_json

_IDENTITY = ("trial_seed", "experiment_id", "trial_id")
"""Keys that identify a trial. Runs outside a job have equal ids, and differ in their seed."""


class Portable:
    """Writes these files into each checkpoint. Create one object per process, and call `write` on rank 0 only."""

    def __init__(self, spec: Mapping[str, Any], code: Path | None, **trial: object) -> None:
        """`spec`: content of trial.json. `code`: folder of the trial's code; None if it is unknown. `trial`: entries
        of load_data.json that describe how to build the trial.

        Raises UsageError if the hyperparameters or the configuration cannot be written as JSON.
        """
        self._code = code
        self._load_data = _json(
            {
                **trial,
                "experiment_config": _masked(spec["config"]),
                **{name: spec[name] for name in ("hparams", *_IDENTITY)},
            }
        )
        self._identity = {name: spec[name] for name in _IDENTITY}
        self._recorded: dict[str, FileEntry] = {}
        """Entries of the code in the resumed checkpoint: code that is damaged later must not get new checksums."""

    def is_of_this_trial(self, folder: Path) -> bool:
        """Return whether this trial wrote the checkpoint in `folder`, with all files that a resume needs."""
        stored = read_json(folder / LOAD_DATA) or {}
        return (folder / PROGRESS).exists() and {name: stored.get(name) for name in _IDENTITY} == self._identity

    def mend(self, folder: Path) -> list[str]:
        """Compare the code in a checkpoint of this experiment with its manifest, and repair damaged files.

        Returns a sentence for each damaged file, see `repair_code`.
        """
        checkpoint = committed_at(folder)
        if checkpoint is None:
            return []
        if self._code is None:
            return repair_code(checkpoint, [], [])
        found = repair_code(checkpoint, [self._kept], [self._code])
        self._recorded = {name.removeprefix(f"{CODE}/"): entry for name, entry in checkpoint.code.items()}
        return found

    def write(self, folder: Path, steps: int, metadata: Mapping[str, Any] | None = None) -> dict[str, FileEntry]:
        """Add the files to the partial folder of a checkpoint at `steps` batches, and return the entries of those in
        `code/`. `metadata`: further entries of metadata.json.

        These are durable and verified already, as the `finish` of `CheckpointContext.save` needs them.
        """
        (folder / LOAD_DATA).write_text(self._load_data, encoding="utf-8")
        (folder / METADATA).write_text(_json({**(metadata or {}), **_metadata(steps)}, "metadata"), encoding="utf-8")
        for name in self._entries:
            _place(self._kept / name, folder / CODE / name)
        return {f"{CODE}/{name}": entry for name, entry in self._entries.items()}

    @cached_property
    def _kept(self) -> Path:
        assert self._code is not None
        return keep_code(self._code)

    @cached_property
    def _entries(self) -> dict[str, FileEntry]:
        if self._code is None:
            return {}
        files = (path for path in sorted(self._kept.rglob("*")) if path.is_file())
        found = {str(path.relative_to(self._kept)): checksum(path) for path in files}
        return found | {name: entry for name, entry in self._recorded.items() if name in found}


def keep_code(code: Path) -> Path:
    """Return a read-only copy of `code` beside it, made at the first call for an experiment. Trials may call it
    concurrently.

    Trials work in `code`: they download data there and append to files. So it is called before the trial is imported.
    All checkpoints share the files of the copy.
    """
    kept = code.with_name(f".{code.name}-kept")
    if not kept.exists():
        partial = temporary_beside(kept)
        partial.mkdir(mode=0o700)
        try:
            shutil.copytree(code, partial, dirs_exist_ok=True, copy_function=_keep, ignore=_not_submitted)
            flush_tree(partial)
            _rename_unless_there(partial, kept)
        except OSError:
            if not kept.exists():  # otherwise another trial made it first, and its training changes `code`
                raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return kept


def _not_submitted(folder: str, names: list[str]) -> set[str]:
    """Return the names that a submitted copy never contains: bytecode, links, and anything but files and folders."""
    paths = ((name, Path(folder, name)) for name in names)
    return {
        name
        for name, path in paths
        if name == "__pycache__" or path.is_symlink() or not (path.is_file() or path.is_dir())
    }


def _keep(source: str, target: str) -> None:
    shutil.copy2(source, target)
    os.chmod(target, os.stat(target).st_mode & 0o555)


def _place(kept: Path, target: Path) -> None:
    """Create a hard link, or a copy if the file system has no hard links."""
    make_folders(target.parent)
    try:
        os.link(kept, target)
    except OSError:
        shutil.copy2(kept, target)
        flush_file(target)


def _rename_unless_there(partial: Path, final: Path) -> None:
    if not final.exists():  # rename(2) would replace an empty folder
        os.rename(partial, final)
    flush_folder(final.parent)


def _metadata(steps: int) -> dict[str, Any]:
    return {
        "hpc_det_version": version("hpc_det"),
        "framework": f"torch-{torch.__version__}",
        "format": "pickle",
        "steps_completed": steps,
    }


def _masked(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with its secrets masked; a script may give any part of a configuration, or none."""
    environment = {"environment_variables": [], **(config.get("environment") or {})}
    return masked({**config, "data": config.get("data") or {}, "environment": environment})


def _json(content: dict[str, Any], what: str = "hyperparameters and configuration") -> str:
    try:
        return json.dumps(content, indent=1) + "\n"
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{what} are stored in checkpoints as JSON: {error}; use numbers, texts, lists and maps"
        ) from None
