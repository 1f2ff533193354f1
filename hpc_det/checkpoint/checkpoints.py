"""Saving and loading together: every rank calls, rank 0 commits, all agree which checkpoint is the newest good one."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hpc_det.checkpoint.async_save import AsyncSave, BackgroundTask
from hpc_det.checkpoint.committed import Committed, committed_at, folders, newest_first
from hpc_det.checkpoint.committed_folder import delete
from hpc_det.checkpoint.content import check_loadable
from hpc_det.checkpoint.object_store import Mirror
from hpc_det.checkpoint.pinned_staging import PinnedStaging
from hpc_det.checkpoint.retention import superfluous
from hpc_det.checkpoint.seals import FileEntry
from hpc_det.checkpoint.staging import Staging, clear_leftovers
from hpc_det.checkpoint.verified import Readers, Reads
from hpc_det.distributed.collectives import Distributed
from hpc_det.node.files import make_folder, make_folders

Finish = Callable[[Path], Mapping[str, FileEntry] | None]
"""Adds files to the partial folder of a checkpoint; the entries of those that are on disk and need no reading."""

Put = Callable[[str, Any], None]
"""A file by its name, and what torch.save takes: when it returns that may change."""

Write = Callable[[Path, Put], None]
"""Adds files to the partial folder of a checkpoint, by itself or by `Put`."""

STALLED_S = 60.0
"""A rank that has failed waits for the save in flight until that has made no progress for so many seconds."""
EXIT_S = 10.0
"""Before the end of the job, for a rank that has failed to report why."""
LONGEST_WAIT_S = 540.0
"""For all of that wait: after ten minutes without a step of the other ranks the gang may be taken for hung."""


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
        copies: PinnedStaging | None = None,
    ) -> None:
        """`mirror`, on rank 0, where they are in an object store, too. `may_commit` raises where it is others'.

        `copies`: for `begin`.
        """
        self._checkpoints = checkpoints
        self._known = KnownCheckpoints(checkpoints)
        self._may_commit = may_commit
        self._distributed = distributed
        self._mirror = mirror
        self._copies = copies or PinnedStaging()
        self._save: AsyncSave | None = None
        self._task: BackgroundTask | None = None
        self.saved: Committed | None = None
        """On rank 0: the last one that was saved here."""

    def save(
        self,
        steps: int,
        files: Mapping[str, Any],
        finish: Finish = _nothing,
        *,
        write: Write | None = None,
        then: Callable[[], object] = lambda: None,
    ) -> str:
        """Write this rank's `files` (name -> what torch.save takes), and commit those of all ranks; the uuid.

        `write` follows on every rank, and when all have written `finish` on rank 0, and `then` after the commit. Files
        without an entry are flushed by rank 0 and read for their checksums.
        """
        save = self._new(files, makes_folder=True)
        save.write(files)
        if write:
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
        write: Write | None = None,
        then: Callable[[], object] = lambda: None,
    ) -> str:
        """Like `save`, but returns when `files` are copied; the rest is done by a thread while training continues.

        `write` has been called then, and without one nothing has touched the disk; `finish` and `then` run in a
        thread. Only when the one before is settled.
        """
        assert not self.in_flight
        save = self._new(files, makes_folder=write is not None)
        copied = dict(self._copies.copy(files))

        def put(name: str, content: Any) -> None:
            copied[name] = self._copies.copy_more(content)

        if write:
            write(save.staging.partial, put)

        def work() -> None:
            try:
                make_folders(save.staging.partial)
                save.write(copied)
                self._commit(save, steps, finish, then)
            finally:
                if self._distributed.is_chief:
                    save.end()

        self._save, self._task = save, BackgroundTask(work)
        return save.staging.uuid

    def allocate(self, *contents: Any) -> None:
        """Not collective. Allocate memory for what `begin` will be given, and for each content that its `write` will
        put, so that the first save takes no longer than the others.
        """
        if not self.in_flight:
            self._copies.allocate(*contents)

    @property
    def in_flight(self) -> bool:
        """Whether a save was begun and is not settled: the same on all ranks."""
        return self._task is not None

    def settled(self, *, wait: bool, timeout_s: float | None = None) -> bool:
        """Whether the save that was begun is committed, and all that comes after it is done. Raises what went wrong.

        `wait`: until it is, or for `timeout_s` at most.
        """
        if self._task is None:
            return True
        if wait:
            self._task.join(timeout_s)
        is_done = self._task.is_done  # asked first: what goes wrong at the very end is seen then, too
        self._task.check()
        if not self._distributed.broadcast_json(is_done):
            return False
        self._task.join()
        self._save = self._task = None
        return True

    def abandon(self) -> bool:
        """Give up the save that was begun. Returns False if it was committed already."""
        if self._save is None or self._task is None:
            return True
        self._save.abandon()
        self._task.join()
        is_committed = self.saved is not None and self.saved.uuid == self._save.staging.uuid
        self._save = self._task = None
        return not self._distributed.broadcast_json(is_committed)

    def wait_before_exit(self, ends_at: Callable[[], float | None] = lambda: None) -> None:
        """Not collective: a rank that has failed waits for the save in flight, since its end is the end of all ranks.

        It waits as long as the save makes progress, `LONGEST_WAIT_S` at most, but not beyond `ends_at`: when the job
        will be gone (seconds since the epoch; None: not known). Whoever knows that may learn it meanwhile.
        """
        latest = time.time() + LONGEST_WAIT_S

        def last_moment() -> float:
            end = ends_at()
            return latest if end is None else min(end - EXIT_S, latest)

        save, task = self._save, self._task
        if save and task:
            task.join_while_progressing(lambda: save.progress, STALLED_S, last_moment)
            if not (self._distributed.is_chief or task.has_failed):
                save.await_end(STALLED_S, last_moment)

    def _new(self, files: Mapping[str, Any], *, makes_folder: bool) -> AsyncSave:
        """`makes_folder`: all ranks find its folder afterwards."""
        check_loadable(files)
        staging = Staging(self._checkpoints, str(uuid.uuid4()))
        if makes_folder and self._distributed.is_chief:
            make_folder(staging.partial)
        return AsyncSave(Staging(self._checkpoints, self._distributed.broadcast_json(staging.uuid)), self._distributed)

    def _commit(self, save: AsyncSave, steps: int, finish: Finish, then: Callable[[], object]) -> None:
        entries, staging = save.gather_entries(), save.staging
        if not self._distributed.is_chief:
            return
        entries.update(finish(staging.partial) or {})
        staging.add_others(entries)
        self._may_commit()
        former = max((each.time for each in self._known.all() if each.steps == steps), default=0.0)
        self.saved = staging.commit(steps, entries, after=former)
        self._known.add(self.saved)
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

        Raises HpcDetError where it is damaged, or where others may have changed it.
        """
        Readers(self._distributed, reads).insist_on_whole(folder.resolve())

    def prune(self, validations: Mapping[int, float], **policy: Any) -> None:
        """Rank 0 only: delete what the policy does not keep (see `superfluous`), and bring the store to the same."""
        here = self._known.all()
        every = self._mirror.with_stored(here) if self._mirror else here
        gone = {checkpoint.uuid for checkpoint in superfluous(every, validations, **policy)}
        for checkpoint in here:
            if checkpoint.uuid in gone:
                delete(checkpoint.path, hidden=f".partial-{checkpoint.uuid}")
        if self._mirror:
            self._mirror.update([checkpoint for checkpoint in every if checkpoint.uuid not in gone], gone)


class KnownCheckpoints:
    def __init__(self, checkpoints: Path) -> None:
        self._checkpoints = checkpoints
        self._known: dict[str, Committed | None] = {}
        """By folder; None: it is no checkpoint."""

    def add(self, checkpoint: Committed) -> None:
        """One that this process has committed."""
        self._known[checkpoint.uuid] = checkpoint

    def all(self) -> list[Committed]:
        """The newest first, as they are there now: others may delete some."""
        self._known = {path.name: self._at(path) for path in folders(self._checkpoints)}
        return newest_first(checkpoint for checkpoint in self._known.values() if checkpoint)

    def _at(self, path: Path) -> Committed | None:
        return self._known[path.name] if path.name in self._known else committed_at(path)
