"""The checkpoints of a trial in an object store: put there after their commit, fetched before a resume.

    URL/EXPERIMENT/TRIAL/UUID/...    the checkpoint's files, and last of all its manifest.json

As on disk, a folder without a whole manifest is no checkpoint, so a kill in an upload leaves none. fsspec reaches the
store (the extra `cloud`); it is imported by the first Remote.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from hpc_det.checkpoint.committed import MANIFEST, Committed, committed, sealed
from hpc_det.errors import UsageError


class Remote:
    """A folder of an object store with the checkpoints of one trial."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        """`options` are the file system's own. UsageError where what reaches it is not installed."""
        try:
            from fsspec.core import url_to_fs

            self._fs, self._root = url_to_fs(url, **options)
        except ImportError as error:
            raise UsageError(f"checkpoint_storage: {url}: {error}; install hpc_det[cloud]") from None

    def upload(self, checkpoint: Committed) -> None:
        for name in [*sorted(checkpoint.files), MANIFEST]:
            self._fs.put_file(str(checkpoint.path / name), f"{self._root}/{checkpoint.uuid}/{name}")

    def remove(self, uuid: str) -> None:
        """The manifest goes first: what is left of a killed removal is no checkpoint."""
        folder = f"{self._root}/{uuid}"
        if self._fs.exists(f"{folder}/{MANIFEST}"):
            self._fs.rm_file(f"{folder}/{MANIFEST}")
        if self._fs.exists(folder):
            self._fs.rm(folder, recursive=True)

    def fetch(self, checkpoints: Path) -> list[str]:
        """Bring the newest whole checkpoint into the folder `checkpoints`, unless there is one as new already.

        Returns what was wrong with each newer one that was skipped.
        """
        here = {checkpoint.uuid: checkpoint.steps for checkpoint in committed(checkpoints)}
        skipped: list[str] = []
        for manifest in sorted(self._manifests(), key=_age, reverse=True):
            if manifest["steps_completed"] <= max(here.values(), default=-1):
                break
            damage = self._download(manifest, checkpoints)
            if not damage:
                break
            skipped.append(f"checkpoint {manifest['uuid']} in {self._root} is damaged: {'; '.join(damage)}")
        return skipped

    def _manifests(self) -> list[dict[str, Any]]:
        if not self._fs.exists(self._root):
            return []
        folders = self._fs.ls(self._root, detail=False)
        found = [self._manifest(PurePosixPath(folder).name) for folder in folders]
        return [manifest for manifest in found if manifest]

    def _manifest(self, uuid: str) -> dict[str, Any] | None:
        try:
            manifest = json.loads(self._fs.cat_file(f"{self._root}/{uuid}/{MANIFEST}"))
        except (OSError, ValueError):
            return None
        whole = isinstance(manifest, dict) and manifest == sealed(manifest) and manifest["uuid"] == uuid
        return manifest if whole else None

    def _download(self, manifest: dict[str, Any], checkpoints: Path) -> list[str]:
        """Into a hidden folder, and by one rename in its place. Returns what is damaged."""
        uuid = manifest["uuid"]
        if outside := [name for name in manifest["files"] if not _is_below(name)]:
            return [f"{name!r} is no file of a checkpoint" for name in outside]
        partial = checkpoints / f".partial-{uuid}"
        shutil.rmtree(partial, ignore_errors=True)
        for name in [*manifest["files"], MANIFEST]:
            target = partial / name
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                self._fs.get_file(f"{self._root}/{uuid}/{name}", str(target))
            except FileNotFoundError:
                return [f"{name}: missing"]
        os.rename(partial, checkpoints / uuid)
        (fetched,) = (found for found in committed(checkpoints) if found.uuid == uuid)
        damage = fetched.damage()
        if damage:
            shutil.rmtree(fetched.path)
        return damage


def remote(storage: Mapping[str, Any], experiment_id: int, trial_id: int) -> Remote | None:
    """Of a trial, by `checkpoint_storage` of its effective config; None where checkpoints stay in a folder."""
    options = {name: storage[key] for key, name in _OPTIONS.items() if storage.get(key) is not None}
    match storage["type"]:
        case "s3":
            url = f"s3://{storage['bucket']}"
        case "gcs":
            url = f"gs://{storage['bucket']}"
        case "azure":
            url = f"az://{storage['container']}"
            options |= _azure_account(storage.get("account_url"))
        case _:
            return None
    parts = [url, (storage.get("prefix") or "").strip("/"), str(experiment_id), str(trial_id)]
    return Remote("/".join(part for part in parts if part), options)


# What checkpoint_storage calls it, and what s3fs and adlfs do.
_OPTIONS = {
    "access_key": "key",
    "secret_key": "secret",
    "endpoint_url": "endpoint_url",
    "connection_string": "connection_string",
    "credential": "credential",
}


def _azure_account(url: str | None) -> dict[str, str]:
    host = urlsplit(url).hostname if url else None
    return {"account_name": host.split(".")[0], "account_host": host} if host else {}


def _is_below(name: str) -> bool:
    """A bucket may be writable for others, and its names become paths here."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def _age(manifest: dict[str, Any]) -> tuple[int, float]:
    return manifest["steps_completed"], manifest["time"]
