"""Collective saving and loading of checkpoints.

All ranks write, rank 0 commits, and all ranks resume from the same undamaged checkpoint.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
from hpc_det.node.files import make_folder

Finish = Callable[[Path], Mapping[str, FileEntry] | None]
"""Adds files to the partial folder of a checkpoint, and may return entries of files that it has flushed to disk."""

Put = Callable[[str, Any], None]
"""Adds a file: its name, and the object for torch.save, which may change as soon as the call has returned."""

Write = Callable[[Path, Put], None]
"""Adds files to the partial folder of a checkpoint, directly or with the Put function that it receives."""

STALLED_S = 60.0
"""Seconds without progress of the save in flight after which a failed rank stops waiting for it."""
EXIT_S = 10.0
"""Seconds before the end of the job that remain for a failed rank to report its failure."""
LONGEST_WAIT_S = 540.0
"""Longest such wait, in seconds."""  # the hang detector may end the gang after ten minutes without a step


def _nothing(*_: Any) -> None:
    pass


def _none(name: str) -> bool:
    return False


class CheckpointContext:
    """The checkpoints of one trial. Methods are collective unless their docstring says otherwise."""

    def __init__(
        self,
        checkpoints: Path,
        distributed: Distributed,
        mirror: Mirror | None = None,
        may_commit: Callable[[], None] = lambda: None,
        copies: PinnedStaging | None = None,
    ) -> None:
        """`mirror`: the copies in an object store, on rank 0; None: checkpoints are only on disk.

        `may_commit` is called before each commit; it raises if a later attempt owns the trial. `copies`: the staging
        memory for `begin`.
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
        """On rank 0: the last checkpoint that this object committed."""

    def save(
        self,
        steps: int,
        files: Mapping[str, Any],
        finish: Finish = _nothing,
        *,
        write: Write | None = None,
        then: Callable[[], object] = lambda: None,
    ) -> str:
        """Write this rank's `files` (name -> object for torch.save), commit the files of all ranks, return the uuid.

        After `files`, every rank calls `write`. When all ranks have written, rank 0 calls `finish`, commits, and calls
        `then`. Rank 0 flushes files that have no entry by then, and reads them for their checksums.
        """
        with self.saving(steps, files, finish, then=then) as save:
            if write:
                write(save.staging.partial, lambda name, content: save.write({name: content}))
        return save.staging.uuid

    @contextmanager
    def saving(
        self,
        steps: int,
        files: Mapping[str, Any],
        finish: Finish = _nothing,
        *,
        then: Callable[[], object] = lambda: None,
    ) -> Iterator[AsyncSave]:
        """Like `save`, but the caller's block writes more files into the partial folder, before the commit.

        An exception in the block leaves the checkpoint uncommitted, and must then leave the block on every rank.
        """
        save = self._new(files, makes_folder=True)
        save.write(files)
        yield save
        self._commit(save, steps, finish, then)
        self._distributed.barrier()

    def begin(
        self,
        steps: int,
        files: Mapping[str, Any],
        finish: Finish = _nothing,
        *,
        write: Write | None = None,
        then: Callable[[], object] = lambda: None,
    ) -> str:
        """Like `save`, but return once `files` are copied in memory; a thread writes them while training continues.

        `write` is called before this returns; `finish` and `then` are called by the thread. Without `write`, nothing
        is written to disk before this returns. The previous save must be settled.
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
                save.make_folder()
                save.write(copied)
                self._commit(save, steps, finish, then)
                save.pass_on_end()
            finally:  # also after an error: failed ranks wait for it (wait_before_exit)
                if self._distributed.is_chief:
                    save.end()

        self._save, self._task = save, BackgroundTask(work)
        return save.staging.uuid

    def allocate(self, *contents: Any) -> None:
        """Allocate memory for copies of `contents`, so that the first save takes no longer than later ones.

        Not collective. `contents`: the `files` of the next `begin`, and each object that its `write` will put.
        """
        if not self.in_flight:
            self._copies.allocate(*contents)

    @property
    def in_flight(self) -> bool:
        """Whether a save was begun and is not settled yet; the same on all ranks."""
        return self._task is not None

    def settled(self, *, wait: bool, timeout_s: float | None = None) -> bool:
        """Return whether the save that was begun is committed and its `then` has returned; True if none is in flight.

        `wait`: wait for that, at most `timeout_s` seconds; None: without limit. Raises the error of a failed save.
        """
        if self._task is None:
            return True
        if wait:
            self._task.join(timeout_s)
        is_done = self._task.is_done  # before check(), so that an error in between is raised, too
        self._task.check()
        if not self._distributed.broadcast_json(is_done):
            return False
        self._task.join()  # short: rank 0 has committed, so the files of this rank are written
        self._save = self._task = None
        return True

    def abandon(self) -> bool:
        """Cancel the save that was begun. Returns False if it is already committed."""
        if self._save is None or self._task is None:
            return True
        self._save.abandon()
        self._task.join()
        # rank 0 may have committed it just before
        is_committed = self.saved is not None and self.saved.uuid == self._save.staging.uuid
        self._save = self._task = None
        return not self._distributed.broadcast_json(is_committed)

    def wait_before_exit(self, ends_at: Callable[[], float | None] = lambda: None) -> None:
        """On a failed rank: wait for the save in flight, because the exit of one rank ends all ranks. Not collective.

        It waits while the save makes progress, but at most LONGEST_WAIT_S, and until EXIT_S before the end of the job.
        `ends_at` returns that end in seconds since the epoch (None: unknown); it is called repeatedly, since a stop
        request may arrive during the wait.
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
        """Check `files`, and return a save with the same uuid on all ranks.

        `makes_folder`: the partial folder exists when this returns.
        """
        check_loadable(files)
        staging = Staging(self._checkpoints, str(uuid.uuid4()))
        if makes_folder and self._distributed.is_chief:
            make_folder(staging.partial)  # before the broadcast, which the other ranks wait for
        save = AsyncSave(Staging(self._checkpoints, self._distributed.broadcast_json(staging.uuid)), self._distributed)
        if makes_folder and self._distributed.nodes > 1:
            save.make_folder()
        return save

    def _commit(self, save: AsyncSave, steps: int, finish: Finish, then: Callable[[], object]) -> None:
        (entries, nodes), staging = save.gather_entries(), save.staging
        if not self._distributed.is_chief:
            return
        entries.update(finish(staging.partial) or {})
        staging.add_others(entries, nodes)
        self._may_commit()
        # the clock of an earlier attempt's node may be ahead: of two checkpoints of a batch, the later one must win
        former = max((each.time for each in self._known.all() if each.steps == steps), default=0.0)
        self.saved = staging.commit(steps, entries, nodes=nodes, after=former)
        self._known.add(self.saved)
        clear_leftovers(self._checkpoints)
        then()

    def newest(self, reads: Reads = _none) -> tuple[Path, int] | None:
        """Return the folder and the batches of the newest undamaged checkpoint, or None; rank 0 prints skipped ones.

        `reads`: returns whether this rank will load the file with a given name. The check leaves such files in the page
        cache of this node, if the file system uses the page cache.
        """
        if self._distributed.is_chief:
            clear_leftovers(self._checkpoints)
        return Readers(self._distributed, reads).newest(self._checkpoints, self._mirror)

    def verify(self, folder: Path, reads: Reads = _none) -> None:
        """Check the checkpoint in `folder`, which the user chose. `reads`: see `newest`.

        Raises HpcDetError if it is damaged, or if other users may have changed it. Checksums are not checked without a
        manifest, as in a checkpoint of Determined.
        """
        Readers(self._distributed, reads).insist_on_whole(folder.resolve())

    def prune(self, validations: Mapping[int, float], **policy: Any) -> None:
        """On rank 0: delete the checkpoints that the policy does not keep, on disk and in the object store.

        `validations`: batches -> searcher metric. `policy`: see `superfluous`. Not collective.
        """
        here = self._known.all()
        every = self._mirror.with_stored(here) if self._mirror else here
        gone = {checkpoint.uuid for checkpoint in superfluous(every, validations, **policy)}
        for checkpoint in here:
            if checkpoint.uuid in gone:
                # after a kill, clear_leftovers deletes the rest by this prefix
                delete(checkpoint.path, hidden=f".partial-{checkpoint.uuid}")
        if self._mirror:
            self._mirror.update([checkpoint for checkpoint in every if checkpoint.uuid not in gone], gone)


class KnownCheckpoints:
    """The checkpoints in one folder; each manifest is read once."""

    def __init__(self, checkpoints: Path) -> None:
        self._checkpoints = checkpoints
        self._known: dict[str, Committed | None] = {}
        """By folder name; None: not a checkpoint."""

    def add(self, checkpoint: Committed) -> None:
        """Add a checkpoint that this process has committed."""
        self._known[checkpoint.uuid] = checkpoint

    def all(self) -> list[Committed]:
        """Return the checkpoints that exist now, newest first; other processes may have deleted some."""
        self._known = {path.name: self._at(path) for path in folders(self._checkpoints)}
        return newest_first(checkpoint for checkpoint in self._known.values() if checkpoint)

    def _at(self, path: Path) -> Committed | None:
        return self._known[path.name] if path.name in self._known else committed_at(path)
