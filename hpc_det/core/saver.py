"""The saves of one attempt: when a checkpoint is written, and what follows its commit.

Training waits only for the copy of the state. The write continues in the background and is settled at a later batch,
the same one on all ranks; at most one save is in flight.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from hpc_det.checkpoint.checkpoints import CheckpointContext, Finish, Put
from hpc_det.checkpoint.retention import RESUME_DEPTH, Policy
from hpc_det.checkpoint.save_schedule import LastSave, SaveSchedule
from hpc_det.checkpoint.seals import FileEntry
from hpc_det.core.progress import PROGRESS, Progress, progress_state
from hpc_det.core.search import Search
from hpc_det.distributed.collectives import Distributed
from hpc_det.distributed.preempt import StopAgreement
from hpc_det.distributed.rng import unchanged_generators
from hpc_det.errors import UsageError

WAIT_S = 2.0
"""Seconds to wait for a save in flight before the next one is postponed to a later batch.

Most disks commit a checkpoint in this time.
"""


class Content(Protocol):
    """The content of a training's checkpoints, on one rank."""

    writes: bool
    """True if each rank writes files with `write`, besides those of `files`."""
    sees_files: bool
    """True if `finish` or `write` of this rank must see the files before the commit, while training waits."""

    def expected(self) -> list[Any]:
        """Return the content of a later save, for the allocation of memory."""
        ...

    def files(self) -> dict[str, Any]:
        """Return what this rank saves with torch.save, by file name."""
        ...

    def write(self, folder: Path, put: Put) -> None:
        """Write more of this rank's state into the partial folder of a checkpoint, directly or with `put`."""
        ...

    def finish(self, folder: Path, steps: int) -> Mapping[str, FileEntry]:
        """Add rank 0's files to the partial folder when all ranks have written, and return entries of flushed ones."""
        ...

    def committed(self, uuid: str) -> None:
        """Take note of a save that is committed and settled; called on all ranks at the same batch."""
        ...


class Flushed(Protocol):
    """The reports of a training, which are on disk before a checkpoint is committed."""

    def flush(self) -> None:
        """Flush all reports to disk. The thread that commits calls this."""
        ...

    def saved(self, steps: int, checkpoint: Path) -> None:
        """Take note of a committed checkpoint, on rank 0."""
        ...


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """Settings for saving and keeping the checkpoints of a training."""

    checkpoints: CheckpointContext
    """The checkpoints on disk."""
    save_schedule: SaveSchedule
    """Decides when to save, besides the periods of the configuration."""
    retention: Callable[[], Policy]
    """Returns the current retention policy."""
    smaller_is_better: bool = True
    """Which validations retention takes for the best."""
    asynchronous: bool = True
    """True if training continues while a checkpoint is written. `Content.sees_files` of any rank disables this."""


class CheckpointSaver:
    """Saves checkpoints. All ranks create it together and call each method at the same batch."""

    def __init__(
        self,
        content: Content,
        checkpointing: Checkpointing,
        distributed: Distributed,
        *,
        progress: Progress,
        search: Search,
        log: Flushed,
        never: bool = False,
    ) -> None:
        """`progress` belongs to the loop and changes as it trains. `never`: nothing is saved."""
        self._content = content
        self._distributed = distributed
        self._checkpoints = checkpointing.checkpoints
        self._progress = progress
        self._search = search
        self._save_schedule = checkpointing.save_schedule
        self._retention = checkpointing.retention
        self._log = log
        self._smaller_is_better = checkpointing.smaller_is_better
        # Ranks may differ in what must see the files, and all must save in the same way.
        sees_files = self._distributed.gather_json(content.sees_files)
        self._asynchronous = checkpointing.asynchronous and not any(sees_files)
        self._never = never
        self._saved: tuple[int, int] | None = None
        """Batches, and batches at the last validation, of the last checkpoint, which may still be in flight."""
        self.is_postponed = False
        """True if a save has been due since an earlier batch."""
        self._is_provisional = False
        """True if the last save was provisional."""
        self._first = progress.steps
        self.next_expectation: float = progress.steps + 1 if self._asynchronous and not self._never else math.inf
        """Number of batches at which `expect` allocates memory again."""
        self._uuid = ""
        """UUID of the last save that this attempt started."""

    @property
    def is_saved(self) -> bool:
        """True if the last checkpoint contains everything trained."""
        return self._never or self._saved == self._reached() or self._progress.steps == 0

    def resumed(self) -> None:
        """Record that the state is that of a checkpoint."""
        self._saved = self._reached()

    def expect(self) -> None:
        """Allocate the memory of the first save, so that it takes no longer than later ones.

        Optimizers have state only after their first step, which may follow some batches, so the number of batches until
        the next allocation doubles each time.
        """
        steps = self._progress.steps
        if steps >= self.next_expectation:
            self.next_expectation = 2 * steps - self._first
            with unchanged_generators():
                self._checkpoints.allocate(*self._content.expected())

    def save(self, *, is_provisional: bool = False) -> None:
        """Start a save and return when training may continue; the checkpoint is committed when the save is settled.

        `is_provisional`: another save of the same batch follows soon, so this one deletes and uploads nothing.
        """
        self.settle()
        self.next_expectation = math.inf  # this save allocates the memory that is missing
        self._save_schedule.save_begins(postponed=self.is_postponed)
        self.is_postponed = False
        save = self._checkpoints.begin if self._asynchronous else self._checkpoints.save
        with unchanged_generators():
            files, finish = self._files()
            steps = self._progress.steps
            then = self._save_schedule.save_committed if is_provisional else self._after_commit()
            self._is_provisional = is_provisional
            write = self._content.write if self._content.writes else None
            self._uuid = save(steps, files, finish, write=write, then=then)
        self._saved = self._reached()
        self._save_schedule.training_goes_on()
        if not self._asynchronous:
            self._ends()

    @contextmanager
    def saving(self) -> Iterator[Path]:
        """Yield the partial folder of a save, into which every rank writes more files; then commit the save.

        Training waits for the commit. An exception in the block must leave it on every rank.
        """
        self.settle()
        self._save_schedule.save_begins(postponed=self.is_postponed)
        self.is_postponed = self._is_provisional = False
        with unchanged_generators():
            files, finish = self._files()
        with self._checkpoints.saving(self._progress.steps, files, finish, then=self._after_commit()) as save:
            folder = save.staging.partial
            written = {name: (folder / name).stat() for name in save.written}
            yield folder
            _insist_on_unchanged(folder, written)
        self._uuid = save.staging.uuid
        self._saved = self._reached()
        self._save_schedule.training_goes_on()
        self._ends()

    def save_when_free(self) -> None:
        """Start a save, or postpone it if another one is in flight for more than WAIT_S seconds.

        A postponed save is tried again at later batches, so that training is not blocked for long.
        """
        if not self.is_postponed:
            self.settle(timeout_s=WAIT_S)
        if self._checkpoints.in_flight:
            self.is_postponed = True
        else:
            self.save()

    def settle(self, *, wait: bool = True, timeout_s: float | None = None) -> None:
        """Finish the save in flight, if it is committed or this may `wait` for the commit."""
        if self._checkpoints.in_flight and self._checkpoints.settled(wait=wait, timeout_s=timeout_s):
            self._ends()

    def save_the_rest(self, stop: StopAgreement) -> None:
        """Save what no checkpoint contains, before all ranks exit."""
        last = LastSave.AFTER_THE_ONE_IN_FLIGHT
        if stop.stopped and not self.is_saved:
            last = self._save_schedule.last_save(stop.deadline, in_flight=self._checkpoints.in_flight)
        if last is LastSave.INSTEAD and not self._checkpoints.abandon():
            self._ends()
        self.settle()
        if not self.is_saved and last is not LastSave.NONE:
            self.save()
            self.settle()
        if self._is_provisional and self._distributed.is_chief:
            self._prune(self._search.validations, RESUME_DEPTH)

    @contextmanager
    def finishing(self, stop: StopAgreement) -> Iterator[None]:
        """Wait for a save in flight if the block raises, as long as the job's deadline allows."""
        try:
            yield
        except BaseException as error:
            if self._checkpoints.in_flight:  # printed before the wait, during which this process may be killed
                failed = f"rank {self._distributed.rank} ends and waits for the save in flight"
                print(f"hpc-det: {failed}: {': '.join(filter(None, [type(error).__name__, str(error)]))}", flush=True)
            self._checkpoints.wait_before_exit(lambda: stop.deadline)
            raise

    def prune_all(self) -> None:
        """Delete all checkpoints that the policy does not keep; the trial is complete and will not be resumed."""
        if self._distributed.is_chief:
            self._prune(self._search.validations)

    # --- helpers

    def _reached(self) -> tuple[int, int]:
        """Return the batches trained, and the batches at the last validation.

        A validation changes what a checkpoint contains: callbacks, and the schedulers that they step.
        """
        return self._progress.steps, self._progress.validated

    def _files(self) -> tuple[dict[str, Any], Finish]:
        """Return this rank's files, and the function that adds the rest on rank 0."""
        files = self._content.files()
        if self._distributed.is_chief:
            files[PROGRESS] = progress_state(self._progress, self._distributed.size)
        return files, partial(self._finish, steps=self._progress.steps)

    def _finish(self, folder: Path, steps: int) -> Mapping[str, FileEntry]:
        self._log.flush()  # a resumed run does not report again what came before the checkpoint
        return self._content.finish(folder, steps)

    def _after_commit(self) -> Callable[[], None]:
        """Return the function that rank 0 calls after the commit, in the thread that writes the checkpoint."""
        validations = dict(self._search.validations)

        def work() -> None:
            self._save_schedule.save_committed()
            self._prune(validations, RESUME_DEPTH)

        return work

    def _ends(self) -> None:
        """Report a committed save to the content, and record its times."""
        with unchanged_generators():
            self._content.committed(self._uuid)
        if saved := self._checkpoints.saved:
            self._log.saved(saved.steps, saved.path)
        self._save_schedule.save_ends(self._progress.steps, self._checkpoints.saved)

    def _prune(self, validations: Mapping[int, float], to_resume_from: int = 0) -> None:
        kept = self._retention()
        self._checkpoints.prune(
            validations,
            smaller_is_better=self._smaller_is_better,
            best=kept.best_while_it_runs,
            latest=max(to_resume_from, kept.trial_latest),
        )


def _insist_on_unchanged(folder: Path, written: Mapping[str, os.stat_result]) -> None:
    """Raise UsageError if a file of the checkpoint itself was replaced in the block of `saving`."""
    changed = [
        name
        for name, then in written.items()
        if not (path := folder / name).exists()
        or (path.stat().st_ino, path.stat().st_mtime_ns) != (then.st_ino, then.st_mtime_ns)
    ]
    if changed:
        raise UsageError(
            f"checkpoint: {', '.join(changed)} belongs to the checkpoint itself and was overwritten or deleted; write "
            f"files with other names"
        )
