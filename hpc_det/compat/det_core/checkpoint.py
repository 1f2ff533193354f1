"""det.core.CheckpointContext: checkpoints whose files the script writes (upstream: determined/core/_checkpoint.py).

A checkpoint is committed at the end of `store_path` and `upload`; after an exception there is none. Its folder has, in
addition to the script's files, those of every checkpoint of hpc_det.
"""

from __future__ import annotations

import enum
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from hpc_det.checkpoint.committed import METADATA
from hpc_det.checkpoint.committed_folder import delete
from hpc_det.checkpoint.storage import TrialStorage
from hpc_det.compat.det_core.session import Session
from hpc_det.compat.det_core.sharded import Selector, copy_files, merged, names_in, shares
from hpc_det.core.chief import RESERVED
from hpc_det.errors import HpcDetError
from hpc_det.node.json_files import read_json
from hpc_det.store.experiments import state_root

logger = logging.getLogger("determined.core")
_STEPS = "steps_completed"


class DownloadMode(enum.Enum):
    """Whether the ranks of a node share one copy, so that all of them must call the method, or each makes its own."""

    LocalWorkersShareDownload = "LOCAL_WORKERS_SHARE_DOWNLOAD"
    NoSharedDownload = "NO_SHARED_DOWNLOAD"


class CheckpointContext:
    """The checkpoints of the trial, and access to those of other trials by their uuid."""

    def __init__(self, session: Session) -> None:
        self._session = session

    # --- saving

    def store_path(
        self, metadata: dict[str, Any] | None = None, *, shard: bool = False
    ) -> AbstractContextManager[tuple[Path, str]]:
        """Return a context manager that yields a folder and the uuid; leaving the block commits the files in it.

        Without `shard` only rank 0 calls it, otherwise RuntimeError. With `shard` every rank does, and all write into
        the same folder; their metadata are merged. Raises ValueError at the end of the block if the metadata have no
        steps_completed.
        """
        return self._sharded(metadata) if shard else self._single(metadata, "store_path")

    def upload(
        self,
        ckpt_dir: str | os.PathLike[str] | None,
        metadata: dict[str, Any] | None = None,
        *,
        shard: bool = False,
        selector: Selector | None = None,
    ) -> str:
        """Commit copies of the files in `ckpt_dir` as a checkpoint, and return its uuid.

        `selector` returns whether a path relative to `ckpt_dir` is taken. With `shard` every rank calls this; ranks
        without files pass None. Raises RuntimeError without `shard` on other ranks than 0 or without a folder, and if
        ranks have different files with the same name.
        """
        folder = None if ckpt_dir is None else Path(ckpt_dir)
        if shard:
            if selector and folder is None:
                raise RuntimeError("upload: a selector needs a ckpt_dir")
            names = shares(self._session.distributed, folder, selector)
        elif folder is None:
            raise RuntimeError("upload: without shard=True, ckpt_dir must be given")
        else:
            names = [name for name in names_in(folder) if selector is None or selector(name)]
        with self._sharded(metadata) if shard else self._single(metadata, "upload") as (path, uuid):
            if folder:
                copy_files(folder, path, names)
        return uuid

    @contextmanager
    def _single(self, metadata: Mapping[str, Any] | None, method: str) -> Iterator[tuple[Path, str]]:
        chief, metadata = self._session.chief, {} if metadata is None else metadata
        if chief is None:
            rank = self._session.run.distributed.rank
            raise RuntimeError(f"{method}: without shard=True only rank 0 may call it, and this is rank {rank}")
        steps = _steps_in(metadata, chief.steps)
        with chief.checkpoint(steps, metadata) as place:
            yield place
            _insist_on_steps(metadata, steps)

    @contextmanager
    def _sharded(self, metadata: Mapping[str, Any] | None) -> Iterator[tuple[Path, str]]:
        distributed, chief = self._session.distributed, self._session.chief
        steps = max(distributed.allgather(_steps_in(metadata or {}, chief.steps if chief else 0)))
        together: dict[str, Any] = {}
        with ExitStack() as commit:
            place = commit.enter_context(chief.checkpoint(steps, together)) if chief else None
            path, uuid = distributed.broadcast(place)
            try:
                yield path, uuid
            except BaseException:
                distributed.allgather((distributed.rank, None))
                raise
            answers = distributed.allgather((distributed.rank, metadata or {}))
            if failed := [rank for rank, given in answers if given is None]:
                raise RuntimeError(f"checkpoint: rank {failed[0]} failed, so nothing was committed")
            together.update(merged([given for _, given in answers]))
            _insist_on_steps(together, steps)
        distributed.broadcast(None)  # after the commit

    # --- loading

    @contextmanager
    def restore_path(
        self,
        storage_id: str,
        download_mode: DownloadMode = DownloadMode.LocalWorkersShareDownload,
        *,
        selector: Selector | None = None,
    ) -> Iterator[Path]:
        """Yield the folder of a checkpoint, whose files must not be changed. A selector has no effect.

        Raises HpcDetError if there is no such checkpoint.
        """
        DownloadMode(download_mode)
        if selector:
            logger.warning("restore_path: the selector has no effect, since the checkpoint's folder itself is returned")
        yield self._folder(storage_id)

    def download(
        self,
        storage_id: str,
        ckpt_dir: str | os.PathLike[str],
        download_mode: DownloadMode = DownloadMode.LocalWorkersShareDownload,
        *,
        selector: Selector | None = None,
    ) -> None:
        """Copy the script's files in a checkpoint, and metadata.json, to the folder `ckpt_dir`.

        Ranks that share a copy get the files that any of them wants. Raises HpcDetError if there is no such
        checkpoint.
        """
        folder, target = self._folder(storage_id), Path(ckpt_dir)
        names = [name for name in names_in(folder) if name.split("/")[0] not in RESERVED]
        wanted = {name for name in names if selector is None or selector(name)}
        distributed = self._session.distributed
        is_shared = DownloadMode(download_mode) is DownloadMode.LocalWorkersShareDownload
        if is_shared:
            wanted = set().union(*distributed.allgather_local(wanted))
        if not is_shared or distributed.local_rank == 0:
            target.mkdir(parents=True, exist_ok=True)
            copy_files(folder, target, sorted(wanted))
        if is_shared:
            distributed.allgather_local(None)  # the files are there when any rank continues

    def get_metadata(self, storage_id: str) -> dict[str, Any]:
        """Return the metadata of a checkpoint. Raises HpcDetError if there is no such checkpoint."""
        found: dict[str, Any] = read_json(self._folder(storage_id) / METADATA) or {}
        return found

    def delete(self, storage_id: str) -> None:
        """Delete a checkpoint of this trial. Raises HpcDetError for any other one."""
        run = self._session.run
        if not storage_id or Path(storage_id).name != storage_id or not (run.folder.checkpoints / storage_id).is_dir():
            raise HpcDetError(
                f"checkpoint {storage_id} is not one of this trial; `hpc-det checkpoint delete` deletes those of others"
            )
        if run.job:
            TrialStorage(run.folder, run.spec["config"]["checkpoint_storage"]).remove(storage_id)
        else:
            delete(run.folder.checkpoints / storage_id, hidden=f".partial-{storage_id}")

    def _folder(self, uuid: str) -> Path:
        """Return the folder of a checkpoint of this trial, of the one that it starts from, or of any other one."""
        run = self._session.run
        own = run.folder.checkpoints / uuid
        if not uuid or Path(uuid).name != uuid:
            raise HpcDetError(f"checkpoint {uuid!r}: expected a uuid")
        if own.is_dir():
            return own
        weights = run.spec.get("warm_start")
        root = state_root(os.environ)
        beside = run.folder.checkpoints.resolve().parent  # with checkpoint_storage, the folders of earlier runs
        others = [
            *([Path(weights)] if weights and Path(weights).name == uuid else []),
            *root.glob(f"experiments/*/trials/*/checkpoints/{uuid}"),
            *root.glob(f"local/*/checkpoints/{uuid}"),
            *beside.glob(f"*/{uuid}"),
        ]
        if not others:
            raise HpcDetError(f"checkpoint {uuid}: not in {run.folder.checkpoints}, and in no other experiment")
        if self._session.chief:
            self._session.chief.verify(others[0])
        return others[0]


def _steps_in(metadata: Mapping[str, Any], otherwise: int) -> int:
    return int(metadata.get(_STEPS, otherwise))


def _insist_on_steps(metadata: Mapping[str, Any], steps: int) -> None:
    """Raise ValueError unless the metadata have the number of batches with which the block began."""
    if _STEPS not in metadata:
        raise ValueError(f"checkpoint: metadata must contain {_STEPS!r}, the number of batches trained")
    if int(metadata[_STEPS]) != steps:
        raise ValueError(f"checkpoint: {_STEPS} is {metadata[_STEPS]}, but was {steps} when the block began")
