"""The objects whose state every checkpoint of a loop contains, saved and restored.

tracked.pth       {name: state dict} of the objects that are the same on every rank           rank 0
shard-R.pth       parts of sharded objects: see hpc_det.core.sharded_tensors                  each rank
rank-R.pth        random generators, position in the loader, objects that differ by rank      each rank
progress.pth      batches, position, validation state, number of ranks                        rank 0
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hpc_det.checkpoint.checkpoints import Put
from hpc_det.checkpoint.content import check_loadable, load
from hpc_det.checkpoint.node_folders import contains, rank_file, shard_file
from hpc_det.checkpoint.rank_files import RankFiles
from hpc_det.checkpoint.seals import FileEntry
from hpc_det.core.ddp_buckets import settle_buckets_in
from hpc_det.core.portable import Portable
from hpc_det.core.progress import PROGRESS, Progress, restored_progress
from hpc_det.core.sharded_tensors import StoredShards, likes_of, shards_in, without_shards
from hpc_det.core.state_dicts import restore
from hpc_det.distributed.collectives import Distributed
from hpc_det.errors import UsageError, nearest

TRACKED = "tracked.pth"


class Resumed:
    """The checkpoint from which this process resumes."""

    def __init__(self, folder: Path, steps: int, rank: int) -> None:
        """`steps`: number of batches, of its manifest. Raises HpcDetError if a file is missing or damaged."""
        self.folder = folder
        self._rank = rank
        self.progress, self.ranks = Progress(steps=steps), 0
        if (folder / PROGRESS).exists():
            self.progress, self.ranks = restored_progress(folder)

    @cached_property
    def tracked(self) -> dict[str, Any]:
        """The state dicts, by name."""
        path = self.folder / TRACKED
        return dict(load(path)) if path.exists() else {}

    @cached_property
    def of_rank(self) -> dict[str, Any]:
        """The content of this rank's file; of rank 0's if the former gang had no such rank; {} without files."""
        file = RankFiles(self.folder).find(rank_file(self._rank if self._rank < self.ranks else 0))
        return dict(file.load()) if file else {}

    @property
    def has_rank(self) -> bool:
        """Whether the former gang had as many ranks, so that this rank continues exactly where it was."""
        return self._rank < self.ranks


class Tracked:
    """The tracked objects of one rank: the content of its checkpoints (see hpc_det.core.saver.Content)."""

    writes = False
    sees_files = False

    def __init__(
        self,
        distributed: Distributed,
        portable: Portable,
        resumed: Resumed | None,
        warm_start: Path | None,
        of_rank: Callable[[], dict[str, Any]],
    ) -> None:
        """`of_rank` returns what this rank's file contains besides objects. `warm_start`: a checkpoint whose models'
        weights a trial without a checkpoint starts with.
        """
        self._distributed = distributed
        self._portable = portable
        self._resumed = resumed
        self._is_late = False
        """Whether the loop has begun, so that an object may be new in it."""
        self._warm_start = warm_start
        self._of_rank = of_rank
        self._shared: dict[str, Any] = {}
        """Objects that are the same on every rank, by name."""
        self._own: dict[str, Any] = {}
        """Objects that differ by rank, by name."""
        self._is_sharded = False
        self.metadata: Mapping[str, Any] = {}
        """Further entries of metadata.json in the next checkpoint."""

    def __bool__(self) -> bool:
        return bool(self._shared or self._own)

    @property
    def objects(self) -> dict[str, Any]:
        """The tracked objects, by name."""
        return {**self._shared, **self._own}

    def add(self, objects: Mapping[str, Any], *, per_rank: bool) -> None:
        """Track the objects, and restore those that the resumed checkpoint contains.

        Raises UsageError for objects without a state, for names that are tracked already, and for names that the
        checkpoint lacks.
        """
        self._check(objects)
        (self._own if per_rank else self._shared).update(objects)
        self._is_sharded |= any(map(_is_sharded, objects.values()))
        for each in objects.values():
            settle_buckets_in(each)
        if self._resumed:
            self._restore(self._resumed, objects, per_rank=per_rank)
        elif self._warm_start and not per_rank:
            self._load_weights(self._warm_start, objects)
        check_loadable({TRACKED: {name: state_of(each) for name, each in objects.items() if not _is_sharded(each)}})

    def forgotten(self) -> list[str]:
        """Return the names in the resumed checkpoint that are not tracked when the loop begins; [] later."""
        is_late, self._is_late = self._is_late, True
        return sorted(self._resumed.tracked.keys() - self._shared.keys()) if self._resumed and not is_late else []

    def expected(self) -> list[Any]:
        return [self.files()] if self else []

    def files(self) -> dict[str, Any]:
        rank = self._distributed.rank
        own = {name: state_of(each) for name, each in self._own.items()}
        files: dict[str, Any] = {rank_file(rank): {**self._of_rank(), "tracked": own}}
        if self._shared and (self._distributed.is_chief or self._is_sharded):
            state = {name: state_of(each) for name, each in self._shared.items()}
            if self._distributed.is_chief:
                files[TRACKED] = without_shards(state)
            if self._is_sharded:
                files[shard_file(rank)] = shards_in(state)
        return files

    def write(self, folder: Path, put: Put) -> None:
        """Write nothing: `files` returns everything."""

    def finish(self, folder: Path, steps: int) -> Mapping[str, FileEntry]:
        return self._portable.write(folder, steps, self.metadata)

    def committed(self, uuid: str) -> None:
        """Do nothing."""

    def reads(self, name: str) -> bool:
        """Return whether this rank loads the file of that name in a resume."""
        return name in (TRACKED, PROGRESS) or contains(name, rank_file(self._distributed.rank))

    # --- helpers

    def _check(self, objects: Mapping[str, Any]) -> None:
        known = self._shared.keys() | self._own.keys()
        problems = [f"track: {name} is tracked already; use another name" for name in objects if name in known]
        problems += [
            f"track: {name} is {type(each).__name__}, which has no state_dict and load_state_dict; pass an object "
            f"with both, or a dict"
            for name, each in objects.items()
            if not (isinstance(each, dict) or (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")))
        ]
        if problems:
            raise UsageError(problems)

    def _restore(self, resumed: Resumed, objects: Mapping[str, Any], *, per_rank: bool) -> None:
        stored = resumed.of_rank.get("tracked", {}) if per_rank else resumed.tracked
        missing = [name for name in objects if name not in stored]
        if self._is_late:  # such as an average that begins in the middle of the training
            objects = {name: each for name, each in objects.items() if name in stored}
        elif missing:
            raise UsageError(
                [
                    f"track: {name} is not in the checkpoint {resumed.folder}, which has "
                    f"{', '.join(sorted(stored)) or 'no tracked object'}; "
                    + (nearest(name, stored) or "track the same names in every attempt")
                    for name in missing
                ]
            )
        shards = StoredShards(resumed.folder, self._distributed.rank)
        for name, each in {**self._changed_by(objects), **objects}.items():
            try:
                _set(
                    each, shards.fitted(stored[name], name, likes_of(each, name)) if _is_sharded(each) else stored[name]
                )
            except (RuntimeError, ValueError, KeyError) as error:
                raise UsageError(
                    f"track: {name} does not fit its state in the checkpoint {resumed.folder}: {error}; restore what "
                    f"was changed since, or begin a new run, outside a job with another `name` for init"
                ) from error

    def _changed_by(self, objects: Mapping[str, Any]) -> dict[str, Any]:
        """Return the optimizers that were restored before, and whose schedulers are among `objects`.

        A scheduler that is created after its optimizer was restored sets the optimizer's learning rate anew.
        """
        changed = {id(getattr(each, "optimizer", None)) for each in objects.values()}
        return {name: each for name, each in self._shared.items() if name not in objects and id(each) in changed}

    def _load_weights(self, folder: Path, objects: Mapping[str, Any]) -> None:
        stored = Resumed(folder, 0, self._distributed.rank).tracked
        for name, each in objects.items():
            if isinstance(each, torch.nn.Module) and name in stored:
                model = _inner(each)
                shards = StoredShards(folder, self._distributed.rank)
                restore(model, shards.fitted(stored[name], name, likes_of(model, name)))


def state_of(tracked: Any) -> Any:
    """Return the state of a tracked object; of a dict, a copy of it."""
    if isinstance(tracked, dict):
        return dict(tracked)
    tracked = _inner(tracked)
    if isinstance(tracked, torch.nn.Module):
        for module in tracked.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # after a forward pass without a backward pass, whole parameters remain
    return tracked.state_dict()


def _inner(tracked: Any) -> Any:
    """Return the model in DistributedDataParallel, whose names a run on one rank has, too; other objects unchanged."""
    return tracked.module if isinstance(tracked, DistributedDataParallel) else tracked


def _set(tracked: Any, state: Any) -> None:
    tracked = _inner(tracked)
    if isinstance(tracked, dict):
        tracked.clear()
        tracked.update(state)
    else:
        restore(tracked, state)


def _is_sharded(tracked: Any) -> bool:
    if isinstance(tracked, torch.nn.Module):
        return any(isinstance(parameter, DTensor) for parameter in tracked.parameters())
    if isinstance(tracked, torch.optim.Optimizer):
        return any(isinstance(each, DTensor) for group in tracked.param_groups for each in group["params"])
    return False
