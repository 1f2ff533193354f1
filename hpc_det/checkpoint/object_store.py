"""Copies of a trial's checkpoints in an object store.

    URL/UUID/...    the checkpoint's files; its manifest.json is uploaded last

As on disk, a folder without a valid manifest is not a checkpoint, so an interrupted upload leaves none. The store is
accessed through fsspec (the extra `cloud`), which is imported when the first Remote is created.

Training continues if the store does not answer: the checkpoint stays on disk, the log contains a warning, and uploads
and deletions that failed are tried again with the next checkpoint.
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
from hpc_det.errors import HpcDetError, UsageError, count, pip_install
from hpc_det.store.folders import TrialFolder

_EXTRAS = {"s3": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure"}
"""The extra of hpc_det with the libraries for each protocol of fsspec."""


class Remote:
    """A folder of an object store with the checkpoints of one trial.

    All methods raise the exceptions of the store's library; these have no common base class.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        """`options`: for the constructor of the fsspec file system.

        Raises UsageError if the store's library is not installed or rejects the options.
        """
        self.url = url
        self._secrets = [value for value in options.values() if isinstance(value, str)]
        try:
            from fsspec.core import url_to_fs

            self._fs, self._root = url_to_fs(url, **options)
        except ImportError as error:
            extra = _EXTRAS.get(url.partition("://")[0])
            remedy = f"; run {pip_install(f'hpc_det[{extra}]')}" if extra else ""
            raise UsageError(f"checkpoint_storage: {url}: {error}{remedy}") from None
        except Exception as error:
            raise UsageError(f"checkpoint_storage: {url}: {self.in_words(error)}") from None

    def in_words(self, error: Exception) -> str:
        """Return the text of an error of the store, without the secrets in `options`."""
        text = f"{type(error).__name__}: {error}"
        for secret in self._secrets:
            text = text.replace(secret, "********")
        return text

    def stored(self, checkpoints: Path) -> list[Committed]:
        """Return the checkpoints with a valid manifest; the path of each is its folder in `checkpoints`, if it exists.

        Their files are not read.
        """
        self._fs.invalidate_cache()  # other processes may have written to the store
        if not self._fs.exists(self._root):
            return []
        uuids = [PurePosixPath(folder).name for folder in self._fs.ls(self._root, detail=False)]
        return [found for uuid in uuids if (found := self._manifest(checkpoints / uuid))]

    def upload(self, checkpoint: Committed) -> None:
        """Copy the files of `checkpoint` into the store, the manifest last."""
        for name in [*sorted(checkpoint.whole.files), MANIFEST]:
            self._fs.put_file(str(checkpoint.path / name), f"{self._root}/{checkpoint.uuid}/{name}")

    def remove(self, uuid: str) -> None:
        """Delete a checkpoint, if it exists."""
        folder = f"{self._root}/{uuid}"
        self._fs.invalidate_cache()
        # The manifest first, so that an interrupted deletion leaves no checkpoint.
        if self._fs.exists(f"{folder}/{MANIFEST}"):
            self._fs.rm_file(f"{folder}/{MANIFEST}")
        self._fs.invalidate_cache()
        if self._fs.exists(folder):
            self._fs.rm(folder, recursive=True)

    def download(self, checkpoint: Committed) -> list[str]:
        """Copy `checkpoint` to its path on disk, and return the problems of its state: see `copy_whole`."""
        source = f"{self._root}/{checkpoint.uuid}"
        return copy_whole(checkpoint, lambda name, target: self._fs.get_file(f"{source}/{name}", str(target)))

    def set_aside(self, uuid: str) -> str:
        """Rename the manifest of a damaged checkpoint, and return the URL of its folder.

        Without a manifest the folder is no longer a checkpoint; its files stay.
        """
        folder = f"{self._root}/{uuid}"
        self._fs.mv(f"{folder}/{MANIFEST}", f"{folder}/damaged-{MANIFEST}")
        return f"{self.url}/{uuid}"

    def has(self, uuid: str) -> bool:
        self._fs.invalidate_cache()
        return bool(self._fs.exists(f"{self._root}/{uuid}/{MANIFEST}"))

    def remove_files(self, checkpoint: Committed, names: Iterable[str]) -> None:
        """Delete the files `names`, which the manifest of `checkpoint` no longer contains."""
        folder = f"{self._root}/{checkpoint.uuid}"
        # The manifest first: an interrupted deletion must not make the checkpoint look damaged.
        self._fs.pipe_file(f"{folder}/{MANIFEST}", FORMAT.text(checkpoint.manifest).encode())
        for name in names:
            self._fs.rm_file(f"{folder}/{name}")

    def remove_all(self) -> None:
        """Delete the folder of the trial, if it exists."""
        self._fs.invalidate_cache()
        if self._fs.exists(self._root):
            self._fs.rm(self._root, recursive=True)

    def _manifest(self, path: Path) -> Committed | None:
        try:
            text = self._fs.cat_file(f"{self._root}/{path.name}/{MANIFEST}")
            found = parsed(text, path)
        except (FileNotFoundError, OddManifest):
            return None
        if json.loads(text).get("uuid") != path.name:  # a copy under another name
            return None
        return found.expanded(lambda name: self._content_of(f"{self._root}/{path.name}/{name}"))

    def _content_of(self, place: str) -> bytes | None:
        try:
            content: bytes = self._fs.cat_file(place)
        except FileNotFoundError:
            return None
        return content


def remote_of(trial: TrialFolder, storage: Mapping[str, Any]) -> Remote | None:
    """Return the folder in an object store for the trial's checkpoints, or None if its experiment has no store.

    `storage`: checkpoint_storage of the effective config.
    """
    url = trial.experiment().checkpoints_url()
    return Remote(f"{url}/{trial.id}", options(storage)) if url else None


def options(storage: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the fsspec file system for `checkpoint_storage` of an effective config."""
    found = {name: storage[key] for key, name in _OPTIONS.items() if storage.get(key) is not None}
    host = urlsplit(storage["account_url"]).hostname if storage.get("account_url") else None
    # Azure: the first part of the host is the account, as in https://ACCOUNT.blob.core.windows.net
    return {**found, "account_name": host.split(".")[0], "account_host": host} if host else found


# Keys of checkpoint_storage -> options of s3fs and adlfs.
_OPTIONS = {
    "access_key": "key",
    "secret_key": "secret",
    "endpoint_url": "endpoint_url",
    "connection_string": "connection_string",
    "credential": "credential",
}


class Mirror:
    """The checkpoints of a trial on disk and in the object store, for the process that writes them."""

    def __init__(self, remote: Remote, checkpoints: Path) -> None:
        self._remote = remote
        self._checkpoints = checkpoints
        self._stored: dict[str, Committed] | None = None
        """Checkpoints in the store by uuid; None: not listed yet."""

    def with_stored(self, here: Sequence[Committed]) -> list[Committed]:
        """Return the checkpoints `here`, on disk, and those that are known to be in the store, newest first."""
        return newest_first({**(self._stored or {}), **{checkpoint.uuid: checkpoint for checkpoint in here}}.values())

    def newest_good(
        self, damage: Damage = Committed.damage, set_aside: SetAside = lambda *_: ""
    ) -> tuple[Committed | None, list[str]]:
        """Return the newest undamaged checkpoint, or None, and a sentence for each one that was skipped.

        A checkpoint that is only in the store is downloaded; if it is damaged, it is set aside in the store. `damage`
        and `set_aside` are for those on disk: see committed.newest_good.

        Raises HpcDetError if the store does not answer and no checkpoint on disk is undamaged.
        """
        here, skipped = newest_good(self._checkpoints, damage, set_aside)
        try:
            fetched = self._fetch(here.steps if here else -1, skipped)
        except Exception as error:
            problem = f"checkpoint_storage: {self._remote.url} cannot be read: {self._remote.in_words(error)}"
            if here is None:
                raise HpcDetError(f"{problem}; no undamaged checkpoint is on disk") from None
            print(f"hpc-det: warning: {problem}; resuming from the newest checkpoint on disk", flush=True)
            return here, skipped
        return fetched or here, skipped

    def update(self, kept: Sequence[Committed], gone: Set[str]) -> None:
        """Upload the checkpoints of `kept` that the store lacks, in that order, then delete the uuids `gone` there.

        An error of the store is printed as a warning.
        """
        try:
            # This may list the store for the first time. What is then in neither `kept` nor `gone` stays, since the
            # policy was not applied to it yet.
            stored = self._known()
            for checkpoint in kept:
                if checkpoint.uuid not in stored:
                    self._remote.upload(checkpoint)
                    stored[checkpoint.uuid] = checkpoint
            for uuid in stored.keys() & gone:
                self._remote.remove(uuid)
                del stored[uuid]
        except Exception as error:  # training continues without the store; the next update tries again
            self._warn(kept, error)

    def _warn(self, kept: Sequence[Committed], error: Exception) -> None:
        missing = [item for item in kept if item.uuid not in (self._stored or {})]
        print(f"hpc-det: warning: {self._remote.url}: {self._remote.in_words(error)}", flush=True)
        for item in missing:
            print(
                f"hpc-det: warning: the checkpoint at {count(item.steps, 'batch')} is not uploaded; it is in "
                f"{item.path}, and the upload is tried again with the next checkpoint",
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
                return checkpoint  # a second download, since the first may have been damaged by the transfer
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
