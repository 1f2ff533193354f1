"""Saving and loading together: every rank calls, rank 0 commits, all agree which checkpoint is the newest good one."""

from __future__ import annotations

import pickle
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hpc_det.checkpoint.committed import Committed, FileEntry, committed, newest_good
from hpc_det.checkpoint.prune import superfluous
from hpc_det.checkpoint.staging import Staging, new_staging
from hpc_det.core.distributed import Distributed
from hpc_det.errors import HpcDetError


class CheckpointContext:
    """The checkpoints of one trial. All methods but `prune` are collective."""

    def __init__(self, checkpoints: Path, distributed: Distributed) -> None:
        self._checkpoints = checkpoints
        self._distributed = distributed
        self._loads = False

    def save(self, steps: int, files: Mapping[str, Any], finish: Callable[[Path], None]) -> str:
        """Write this rank's `files` (name -> what torch.save takes), and commit those of all ranks; the uuid.

        `finish(partial folder)` runs on rank 0 before the commit; files it adds belong to the checkpoint.
        """
        chief = self._distributed.is_chief
        uuid = self._distributed.broadcast_json(new_staging(self._checkpoints).uuid if chief else None)
        staging = Staging(self._checkpoints, uuid)
        entries: dict[str, FileEntry] = {}
        for name, content in files.items():
            with staging.file(name, entries) as file:
                torch.save(content, file)  # type: ignore[arg-type]  # anything that writes will do
            self._check_that_it_loads(staging.partial / name)
        self._loads = True
        written = self._distributed.gather_json({name: asdict(entry) for name, entry in entries.items()})
        if chief:
            everyone = {name: FileEntry(**entry) for part in written for name, entry in part.items()}
            finish(staging.partial)
            staging.add_others(everyone)
            staging.commit(steps, everyone)
        self._distributed.barrier()
        return str(uuid)

    def _check_that_it_loads(self, path: Path) -> None:
        """Once a run: better to refuse the first save than the first resume."""
        if self._loads:
            return
        try:
            load(path)
        except pickle.UnpicklingError as error:
            culprit = re.search(r"GLOBAL (\S+)", str(error))
            raise HpcDetError(
                f"{path.name}: holds {culprit[1] if culprit else 'an object'}, which no resume would load, since that "
                f"could run code; let callbacks, optimizers and schedulers save tensors, numbers, texts, lists and maps"
            ) from None

    def newest(self) -> tuple[Path, int] | None:
        """The folder and batches of the newest checkpoint that is whole. Rank 0 reads, and names what it skips."""
        found = None
        if self._distributed.is_chief:
            checkpoint, skipped = newest_good(self._checkpoints)
            for problem in skipped:
                print(f"hpc-det: skipped: {problem}", flush=True)
            found = (checkpoint.uuid, checkpoint.steps) if checkpoint else None
        found = self._distributed.broadcast_json(found)
        return (self._checkpoints / found[0], found[1]) if found else None

    def prune(self, validations: Mapping[int, float], **policy: Any) -> None:
        """Rank 0 only: delete what the policy does not keep (see `superfluous`)."""
        for checkpoint in superfluous(committed(self._checkpoints), validations, **policy):
            _delete(checkpoint)


def _delete(checkpoint: Committed) -> None:
    """Hidden by a rename first: a half-deleted folder is no checkpoint."""
    hidden = checkpoint.path.with_name(f".partial-{checkpoint.uuid}")
    checkpoint.path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def load(path: Path) -> Any:
    """A file of a checkpoint, on the CPU, without unpickling anything but tensors and plain containers."""
    return torch.load(path, map_location="cpu", weights_only=True)
