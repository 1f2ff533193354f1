"""The checkpoints of a trial, here and in an object store.

Training does not end for a store that does not answer: a checkpoint stays in its folder, the log says so, and what
could not be uploaded or removed is tried again with the next one.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from pathlib import Path

from hpc_det.checkpoint.committed import (
    Committed,
    Damage,
    SetAside,
    lacks_files,
    newest_first,
    newest_good,
)
from hpc_det.checkpoint.damaged import note
from hpc_det.checkpoint.remote import Remote
from hpc_det.errors import HpcDetError


class Mirror:
    """Of one process, the only one that writes these checkpoints."""

    def __init__(self, remote: Remote, checkpoints: Path) -> None:
        self._remote = remote
        self._checkpoints = checkpoints
        self._stored: dict[str, Committed] | None = None
        """By uuid; None: the store has not told yet."""

    def with_stored(self, here: Sequence[Committed]) -> list[Committed]:
        """Those `here` and those that are known to be in the store, the newest first."""
        return newest_first({**(self._stored or {}), **{checkpoint.uuid: checkpoint for checkpoint in here}}.values())

    def newest_good(
        self, damage: Damage = Committed.damage, set_aside: SetAside = lambda *_: ""
    ) -> tuple[Committed | None, list[str]]:
        """The newest that is whole, fetched if it is not here, and what was wrong with each that was skipped.

        `damage`: of one that is here; `set_aside`: see committed.newest_good. One that is damaged in the store is set
        aside there.

        Raises HpcDetError where the store does not answer and nothing is here to go on from.
        """
        here, skipped = newest_good(self._checkpoints, damage, set_aside)
        try:
            fetched = self._fetch(here.steps if here else -1, skipped)
        except Exception as error:
            problem = f"checkpoint_storage: {self._remote.url} cannot be read: {self._remote.in_words(error)}"
            if here is None:
                raise HpcDetError(f"{problem}; no checkpoint is here to go on from instead") from None
            print(f"hpc-det: warning: {problem}; going on from the checkpoint here", flush=True)
            return here, skipped
        return fetched or here, skipped

    def update(self, kept: Sequence[Committed], gone: Set[str]) -> None:
        """Upload those of `kept` that the store lacks, the newest first; when it has them all, remove the uuids `gone`.

        What is in neither stays: the store has told of it just now, and nobody has judged it.
        """
        try:
            stored = self._known()
            for checkpoint in kept:
                if checkpoint.uuid not in stored:
                    self._remote.upload(checkpoint)
                    stored[checkpoint.uuid] = checkpoint
            for uuid in stored.keys() & gone:
                self._remote.remove(uuid)
                del stored[uuid]
        except Exception as error:
            self._warn(kept, error)

    def _warn(self, kept: Sequence[Committed], error: Exception) -> None:
        missing = [item for item in kept if item.uuid not in (self._stored or {})]
        print(f"hpc-det: warning: {self._remote.url}: {self._remote.in_words(error)}", flush=True)
        for item in missing:
            print(
                f"hpc-det: warning: the checkpoint at {item.steps} batches is not uploaded; it is in {item.path}, and "
                f"the next one comes with another try",
                flush=True,
            )

    def _known(self) -> dict[str, Committed]:
        if self._stored is None:
            self._stored = {item.uuid: item for item in self._remote.stored(self._checkpoints)}
        return self._stored

    def _fetch(self, newer_than: int, skipped: list[str]) -> Committed | None:
        for checkpoint in newest_first(self._known().values()):
            if checkpoint.steps <= newer_than:
                return None
            if checkpoint.removed:
                skipped.append(f"checkpoint {checkpoint.uuid} in {self._remote.url} {lacks_files(checkpoint)}")
                continue
            if not self._remote.download(checkpoint) or not (damage := self._remote.download(checkpoint)):
                return checkpoint  # the way from the store may have been what was wrong at first
            kept, what = self._set_aside(checkpoint, damage), "; ".join(damage)
            skipped.append(f"checkpoint {checkpoint.uuid} in {self._remote.url} is damaged: {what}{kept}")
            del self._known()[checkpoint.uuid]
        return None

    def _set_aside(self, checkpoint: Committed, damage: list[str]) -> str:
        try:
            place = self._remote.set_aside(checkpoint.uuid)
        except Exception as error:
            return f"; setting it aside failed: {self._remote.in_words(error)}"
        return note(self._checkpoints, checkpoint.uuid, checkpoint.steps, damage, place)
