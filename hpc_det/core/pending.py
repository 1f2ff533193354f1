"""One checkpoint on its way to the disk: what a rank does for it, in the training thread or behind it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from threading import Event, Thread
from typing import Any

import torch
from torch.serialization import get_crc32_options, set_crc32_options

from hpc_det.checkpoint.committed import FileEntry
from hpc_det.checkpoint.staging import Staging
from hpc_det.core.distributed import Distributed
from hpc_det.store import full_disk


class Abandoned(Exception):
    """Nobody wants this checkpoint any more."""


class Pending:
    """No collective is in it, so that training may go on meanwhile: ranks tell rank 0 through the gang's store."""

    def __init__(self, staging: Staging, distributed: Distributed) -> None:
        self.staging = staging
        self._distributed = distributed
        self._entries: dict[str, FileEntry] = {}
        self._abandoned = Event()

    def write(self, files: Mapping[str, Any]) -> None:
        """Name -> what torch.save takes."""
        with _without_second_checksum(), full_disk.needs(bytes_in(files)):
            for name, content in files.items():
                with self.staging.file(name, self._entries, self._go_on) as file:
                    torch.save(content, file)  # type: ignore[arg-type]  # anything that writes will do

    def everyones(self) -> dict[str, FileEntry]:
        """The entries of all ranks on rank 0, when all have written; nothing on others. Raises Abandoned."""
        store, gang = self._distributed.side_store(), self._distributed
        keys = [f"saved/{self.staging.uuid}/{rank}" for rank in range(gang.size)]
        store.set(keys[gang.rank], json.dumps({name: asdict(entry) for name, entry in self._entries.items()}))
        if not gang.is_chief:
            return {}
        for pause_s in _pauses():
            if store.check(keys):
                break
            self._abandoned.wait(pause_s)
            self._go_on()
        written = [json.loads(store.get(key)) for key in keys]
        for key in keys:
            store.delete_key(key)
        return {name: FileEntry(**entry) for part in written for name, entry in part.items()}

    def end(self) -> None:
        """Rank 0, which has committed it or never will, tells those that `await_end`."""
        self._distributed.side_store().set(self._end, "")

    def await_end(self, timeout_s: float) -> None:
        """Not on rank 0. It may come later, or with the death of rank 0."""
        with suppress(RuntimeError):
            self._distributed.side_store().wait([self._end], timedelta(seconds=timeout_s))

    @property
    def _end(self) -> str:
        return f"saved/{self.staging.uuid}"

    def abandon(self) -> None:
        """From another thread."""
        self._abandoned.set()

    def _go_on(self) -> None:
        if self._abandoned.is_set():
            raise Abandoned


class Behind:
    """Work that goes on behind the training."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, args=(work,), name="save", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def join(self, timeout_s: float | None = None) -> None:
        self._thread.join(timeout_s)

    def check(self) -> None:
        """Raises what has gone wrong with it so far."""
        if self._error:
            raise self._error

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Abandoned:
            pass
        except BaseException as error:
            self._error = error


def bytes_in(content: Any) -> int:
    """Of the tensors in it."""
    if isinstance(content, torch.Tensor):
        return content.nbytes
    if isinstance(content, Mapping):
        return sum(map(bytes_in, content.values()))
    return sum(map(bytes_in, content)) if isinstance(content, (list, tuple)) else 0


def _pauses() -> Iterator[float]:
    """Short at first, for small gangs; a large one asks its store seldom."""
    began = time.monotonic()
    while True:
        yield min(0.002 + (time.monotonic() - began) / 10, 0.1)


@contextmanager
def _without_second_checksum() -> Iterator[None]:
    """torch would compute one of each tensor for the zip archive, which torch.load does not look at."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)
