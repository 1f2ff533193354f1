"""Saving and loading together: every rank calls, rank 0 commits, all agree which checkpoint is the newest good one."""

from __future__ import annotations

import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hpc_det.checkpoint.committed import MANIFEST, Committed, FileEntry, committed, delete
from hpc_det.checkpoint.mirror import Mirror
from hpc_det.checkpoint.prune import superfluous
from hpc_det.checkpoint.staging import Staging, clear_leftovers
from hpc_det.core.distributed import Distributed
from hpc_det.core.numpy_values import is_plain, stand_ins, with_arrays
from hpc_det.core.save import Behind, Save
from hpc_det.core.verified import Readers, Reads
from hpc_det.core.warm_copies import WarmCopies
from hpc_det.errors import HpcDetError

Finish = Callable[[Path], Mapping[str, FileEntry] | None]
"""Adds files to the partial folder of a checkpoint; the entries of those that are on disk and need no reading."""

Put = Callable[[str, Any], None]
"""A file by its name, and what torch.save takes: when it returns that may change."""

Write = Callable[[Path, Put], None]
"""Adds files to the partial folder of a checkpoint, by itself or by `Put`."""

PART_S = 60.0
"""A rank that has failed waits so long for its own part of a checkpoint, and as long for the commit."""


def _nothing(*_: Any) -> None:
    pass


def _none(name: str) -> bool:
    return False


class CheckpointContext:
    """The checkpoints of one trial. All methods but `prune` are collective."""

    def __init__(
        self,
        checkpoints: Path,
        distributed: Distributed,
        mirror: Mirror | None = None,
        may_commit: Callable[[], None] = lambda: None,
        copies: WarmCopies | None = None,
    ) -> None:
        """`mirror`, on rank 0, where they are in an object store, too. `may_commit` raises where it is others'.

        `copies`: for `begin`.
        """
        self._checkpoints = checkpoints
        self._may_commit = may_commit
        self._distributed = distributed
        self._mirror = mirror
        self._copies = copies or WarmCopies()
        self._save: Save | None = None
        self._behind: Behind | None = None
        self.saved: Committed | None = None
        """On rank 0: the last one that was saved here."""

    def save(
        self,
        steps: int,
        files: Mapping[str, Any],
        finish: Finish = _nothing,
        *,
        write: Write = _nothing,
        then: Callable[[], object] = lambda: None,
    ) -> str:
        """Write this rank's `files` (name -> what torch.save takes), and commit those of all ranks; the uuid.

        `write` follows on every rank, and when all have written `finish` on rank 0, and `then` after the commit. Files
        without an entry are flushed by rank 0 and read for their checksums.
        """
        save = self._new_save(files)
        save.write(files)
        write(save.staging.partial, lambda name, content: save.write({name: content}))
        self._commit(save, steps, finish, then)
        self._distributed.barrier()
        return save.staging.uuid

    def begin(
        self,
        steps: int,
        files: Mapping[str, Any],
        finish: Finish = _nothing,
        *,
        write: Write = _nothing,
        then: Callable[[], object] = lambda: None,
    ) -> str:
        """The same, but all that lasts goes on behind the training: when it returns, `files` are copied.

        `write` has been called then; `finish` and `then` run in a thread. Only when the one before is settled.
        """
        assert not self.in_flight
        save = self._new_save(files)
        copied = dict(self._copies.of(files))

        def put(name: str, content: Any) -> None:
            copied[name] = self._copies.also(content)

        write(save.staging.partial, put)

        def work() -> None:
            try:
                save.write(copied)
                self._commit(save, steps, finish, then)
            finally:
                if self._distributed.is_chief:
                    save.end()

        self._save, self._behind = save, Behind(work)
        return save.staging.uuid

    def expect(self, tensors: Iterable[torch.Tensor]) -> None:
        """Not collective: what `begin` will be given, so that the first one takes no longer than the others."""
        self._copies.expect(tensors)

    @property
    def in_flight(self) -> bool:
        """Whether one was begun and is not settled: the same on all ranks."""
        return self._behind is not None

    def settled(self, *, wait: bool) -> bool:
        """Whether the one that was begun is committed, and all that comes after it is done. Raises what went wrong."""
        if self._behind is None:
            return True
        if wait:
            self._behind.join()
        is_done = self._behind.is_done  # asked first: what goes wrong at the very end is seen then, too
        self._behind.check()
        if not self._distributed.broadcast_json(is_done):
            return False
        self._behind.join()
        self._save = self._behind = None
        return True

    def abandon(self) -> None:
        """The one that was begun is not wanted any more; it may be committed nevertheless."""
        if self._save and self._behind:
            self._save.abandon()
            self._behind.join()
        self._save = self._behind = None
        self._distributed.barrier()

    def part(self) -> None:
        """Not collective: a rank that leaves after a failure takes all along; first, the one that was begun ends."""
        if self._save and self._behind:
            self._behind.join(PART_S)
            if not (self._distributed.is_chief or self._behind.has_failed):
                self._save.await_end(PART_S)

    def _new_save(self, files: Mapping[str, Any]) -> Save:
        check_loadable(files)
        uuid = Staging.made(self._checkpoints).uuid if self._distributed.is_chief else None
        return Save(Staging(self._checkpoints, self._distributed.broadcast_json(uuid)), self._distributed)

    def _commit(self, save: Save, steps: int, finish: Finish, then: Callable[[], object]) -> None:
        everyones, staging = save.everyones(), save.staging
        if not self._distributed.is_chief:
            return
        everyones.update(finish(staging.partial) or {})
        staging.add_others(everyones)
        self._may_commit()
        self.saved = staging.commit(steps, everyones)
        clear_leftovers(self._checkpoints)
        then()

    def newest(self, reads: Reads = _none) -> tuple[Path, int] | None:
        """The folder and batches of the newest checkpoint that is whole; rank 0 names what it skips.

        `reads`: what this rank is going to load of it. It is in its node's memory then, where the file system lets it.
        """
        if self._distributed.is_chief:
            clear_leftovers(self._checkpoints)
        return Readers(self._distributed, reads).newest(self._checkpoints, self._mirror)

    def verify(self, folder: Path, reads: Reads = _none) -> None:
        """The same for a checkpoint anywhere that was told; one without a manifest, Determined's, is taken as it is.

        Raises HpcDetError where it is damaged.
        """
        if self._distributed.broadcast_json((folder / MANIFEST).exists()):
            Readers(self._distributed, reads).insist_on_whole(folder)

    def prune(self, validations: Mapping[int, float], **policy: Any) -> None:
        """Rank 0 only: delete what the policy does not keep (see `superfluous`), and bring the store to the same."""
        every = self._mirror.all() if self._mirror else committed(self._checkpoints)
        gone = {checkpoint.uuid for checkpoint in superfluous(every, validations, **policy)}
        for checkpoint in committed(self._checkpoints):
            if checkpoint.uuid in gone:
                delete(checkpoint.path, hidden=f".partial-{checkpoint.uuid}")
        if self._mirror:
            self._mirror.update([checkpoint for checkpoint in every if checkpoint.uuid not in gone], gone)


_VALUES = (bool, int, float, complex, str, bytes, bytearray, type(None), torch.dtype, torch.device)
_MAPS = (dict, OrderedDict, Counter)
_ROWS = (list, tuple, set, torch.Size)


def check_loadable(files: Mapping[str, Any]) -> None:
    """Raises HpcDetError naming everything in `files` that `load` would refuse."""
    if problems := [problem for name, content in files.items() for problem in not_loadable(content, name)]:
        raise HpcDetError(problems)


def not_loadable(content: Any, path: str) -> Iterator[str]:
    """What `load` would refuse, since it could run code: better no save than a resume that fails.

    Classes derived from these are refused, too: unpickling would have to import them.
    """
    kind = type(content)
    if kind in _MAPS:
        for key, value in content.items():
            yield from not_loadable(key, f"{path}: the key {key!r}")
            yield from not_loadable(value, f"{path}: {key}" if path.endswith(".pth") else f"{path}.{key}")
    elif kind in _ROWS:
        for i, value in enumerate(content):
            yield from not_loadable(value, f"{path}[{i}]")
    elif kind not in _VALUES and not _is_tensor(content) and not is_plain(content):
        found = f"{content.dtype} array" if kind is np.ndarray else f"{kind.__module__}.{kind.__name__}"
        yield f"{path}: {found} cannot be part of a checkpoint; save tensors, numbers, texts, lists and maps of them"


def _is_tensor(content: Any) -> bool:
    """One by itself: a DTensor, say, is a part of one, and to unpickle it takes the gang that it is spread over."""
    return isinstance(content, torch.Tensor) and not is_traceable_wrapper_subclass(content)


def load(path: Path, **options: Any) -> Any:
    """A file of a checkpoint, on the CPU, unpickling nothing but tensors, numpy's numbers, texts and plain containers.

    `options`: torch.load's `map_location` and `mmap`. Raises pickle.UnpicklingError where the file holds anything else.
    """
    with stand_ins():
        return with_arrays(torch.load(path, **{"map_location": "cpu", **options, "weights_only": True}))


def read(path: Path, **options: Any) -> Any:
    """`load`, for a file that somebody else may have written: raises HpcDetError that says what is wrong with it."""
    try:
        return load(path, **options)
    except pickle.UnpicklingError as error:
        raise HpcDetError(
            f"{path}: holds more than tensors, numbers, texts, lists and maps, and to load it could run code that it "
            f"brings ({_reason(error)}). If you trust it: torch.load it with weights_only=False, take that out, and "
            f"torch.save it"
        ) from None
    except Exception as error:
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        raise HpcDetError(f"{path}: cannot be read ({said}); it may be damaged: use another checkpoint") from None


def _reason(error: pickle.UnpicklingError) -> str:
    """torch's own words, between its advice how to load the file anyway and the address of its documentation."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = lines[-2] if len(lines) > 1 else str(error)
    return reason.removeprefix("WeightsUnpickler error: ").partition(". Please use ")[0]
