"""The checkpoints of a trial, here and in an object store.

    URL/UUID/...    the checkpoint's files, and last of all its manifest.json

As on disk, a folder without a whole manifest is no checkpoint, so a kill in an upload leaves none. fsspec reaches the
store (the extra `cloud`); it is imported by the first Remote.

Training does not end for a store that does not answer: a checkpoint stays in its folder, the log says so, and what
could not be uploaded or removed is tried again with the next one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from hpc_det.checkpoint.committed import (
    FORMAT,
    MANIFEST,
    Committed,
    Damage,
    SetAside,
    copy_whole,
    lacks_files,
    newest_first,
    newest_good,
    parsed,
)
from hpc_det.checkpoint.committed_folder import OddManifest
from hpc_det.checkpoint.damaged import record_damage
from hpc_det.errors import HpcDetError, UsageError
from hpc_det.store.folders import TrialFolder


class Remote:
    """A folder of an object store with the checkpoints of one trial. All methods raise what the store's library does:
    no two agree on it.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        """`options` are the file system's own.

        Raises UsageError where what reaches it is not installed, or does not take them.
        """
        self.url = url
        self._secrets = [value for value in options.values() if isinstance(value, str)]
        try:
            from fsspec.core import url_to_fs

            self._fs, self._root = url_to_fs(url, **options)
        except ImportError as error:
            raise UsageError(f"checkpoint_storage: {url}: {error}; install hpc_det[cloud]") from None
        except Exception as error:
            raise UsageError(f"checkpoint_storage: {url}: {self.in_words(error)}") from None

    def in_words(self, error: Exception) -> str:
        """An error of the store, without what opens it."""
        text = f"{type(error).__name__}: {error}"
        for secret in self._secrets:
            text = text.replace(secret, "********")
        return text

    def stored(self, checkpoints: Path) -> list[Committed]:
        """All that are whole by their manifests, each with the path that it has, or would have, in `checkpoints`."""
        self._fs.invalidate_cache()  # what others wrote meanwhile
        if not self._fs.exists(self._root):
            return []
        uuids = [PurePosixPath(folder).name for folder in self._fs.ls(self._root, detail=False)]
        return [found for uuid in uuids if (found := self._manifest(checkpoints / uuid))]

    def upload(self, checkpoint: Committed) -> None:
        for name in [*sorted(checkpoint.files), MANIFEST]:
            self._fs.put_file(str(checkpoint.path / name), f"{self._root}/{checkpoint.uuid}/{name}")

    def remove(self, uuid: str) -> None:
        """The manifest goes first: what is left of a killed removal is no checkpoint."""
        folder = f"{self._root}/{uuid}"
        self._fs.invalidate_cache()
        if self._fs.exists(f"{folder}/{MANIFEST}"):
            self._fs.rm_file(f"{folder}/{MANIFEST}")
        self._fs.invalidate_cache()
        if self._fs.exists(folder):
            self._fs.rm(folder, recursive=True)

    def download(self, checkpoint: Committed) -> list[str]:
        """To its path, where it may replace a damaged one; what is damaged: see `copy_whole`."""
        source = f"{self._root}/{checkpoint.uuid}"
        return copy_whole(checkpoint, lambda name, target: self._fs.get_file(f"{source}/{name}", str(target)))

    def set_aside(self, uuid: str) -> str:
        """Without its manifest it is no checkpoint any more; it stays where it is. Its place."""
        folder = f"{self._root}/{uuid}"
        self._fs.mv(f"{folder}/{MANIFEST}", f"{folder}/damaged-{MANIFEST}")
        return f"{self.url}/{uuid}"

    def has(self, uuid: str) -> bool:
        self._fs.invalidate_cache()
        return bool(self._fs.exists(f"{self._root}/{uuid}/{MANIFEST}"))

    def remove_files(self, checkpoint: Committed, names: Iterable[str]) -> None:
        """`names`, which `checkpoint` no longer has: its manifest goes first."""
        folder = f"{self._root}/{checkpoint.uuid}"
        self._fs.pipe_file(f"{folder}/{MANIFEST}", FORMAT.text(checkpoint.manifest).encode())
        for name in names:
            self._fs.rm_file(f"{folder}/{name}")

    def remove_all(self) -> None:
        """The whole folder."""
        self._fs.invalidate_cache()
        if self._fs.exists(self._root):
            self._fs.rm(self._root, recursive=True)

    def _manifest(self, path: Path) -> Committed | None:
        try:
            text = self._fs.cat_file(f"{self._root}/{path.name}/{MANIFEST}")
            found = parsed(text, path)
        except (FileNotFoundError, OddManifest):
            return None
        return found if json.loads(text).get("uuid") == path.name else None


def remote_of(trial: TrialFolder, storage: Mapping[str, Any]) -> Remote | None:
    """Where the trial's checkpoints are copied to, by `checkpoint_storage` of its config; None: to no store."""
    url = trial.experiment().checkpoints_url()
    return Remote(f"{url}/{trial.id}", options(storage)) if url else None


def options(storage: Mapping[str, Any]) -> dict[str, Any]:
    """What the file system needs, by `checkpoint_storage` of an effective config."""
    found = {name: storage[key] for key, name in _OPTIONS.items() if storage.get(key) is not None}
    host = urlsplit(storage["account_url"]).hostname if storage.get("account_url") else None
    return {**found, "account_name": host.split(".")[0], "account_host": host} if host else found


# What checkpoint_storage calls it, and what s3fs and adlfs do.
_OPTIONS = {
    "access_key": "key",
    "secret_key": "secret",
    "endpoint_url": "endpoint_url",
    "connection_string": "connection_string",
    "credential": "credential",
}


class Mirror:
    """The checkpoints here and in the store, for the only process that writes them."""

    def __init__(self, remote: Remote, checkpoints: Path) -> None:
        self._remote = remote
        self._checkpoints = checkpoints
        self._stored: dict[str, Committed] | None = None
        """By uuid; None: the store was not asked yet."""

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
        return record_damage(self._checkpoints, checkpoint.uuid, checkpoint.steps, damage, place)
