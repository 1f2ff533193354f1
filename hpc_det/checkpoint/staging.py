"""Writing a checkpoint: every rank writes its files to a hidden partial folder, and rank 0 commits it by one rename."""

from __future__ import annotations

import math
import os
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from hpc_det.checkpoint.committed import FORMAT, Committed, checksum, manifest_of, node_manifest
from hpc_det.checkpoint.reading import open_regular
from hpc_det.checkpoint.sealed_files import SealedFile, sealed_file
from hpc_det.checkpoint.seals import CRC, FileEntry
from hpc_det.errors import HpcDetError
from hpc_det.node import disk
from hpc_det.node.files import flush_folder, make_folder, make_folders, set_mode, write_atomic, write_flushed


@dataclass(frozen=True)
class Staging:
    """A checkpoint that is being written. All ranks have the same uuid; each rank writes files with other names."""

    checkpoints: Path
    uuid: str

    @property
    def partial(self) -> Path:
        return self.checkpoints / f".partial-{self.uuid}"

    @contextmanager
    def file(
        self, name: str, entries: dict[str, FileEntry], go_on: Callable[[], object] = lambda: None
    ) -> Iterator[SealedFile[FileEntry]]:
        """Open a file for writing; when the `with` block ends, it is flushed to disk and its entry is in `entries`.

        `name`: a relative path. `go_on` is called before each block is written; it may raise to cancel the file.
        """
        path = self.partial / name
        if "/" in name and not path.parent.is_dir():
            make_folders(path.parent)
        with sealed_file(path, CRC, go_on) as file:
            yield file
        entries[name] = file.entry

    def add_others(self, entries: dict[str, FileEntry], nodes: Collection[str] = ()) -> None:
        """Flush the files that callbacks have put into the partial folder, and add their entries.

        `nodes`: the folders of nodes, which are complete; they are not read, since they have the files of all ranks.
        """
        self._add_others(self.partial, entries, nodes)

    def _add_others(self, folder: Path, entries: dict[str, FileEntry], nodes: Collection[str] = ()) -> None:
        with os.scandir(folder) as found:
            inside = sorted(found, key=lambda entry: entry.name)
        for entry in inside:
            path = Path(entry.path)
            name = str(path.relative_to(self.partial))
            if entry.is_symlink():
                _replace_link(path)
            if entry.is_dir(follow_symlinks=False):
                if name not in nodes:
                    set_mode(path)
                    self._add_others(path, entries)
                    flush_folder(path)
            elif name not in entries:
                entries[name] = _flushed(path)

    def finish_node(self, node: str, entries: Mapping[str, FileEntry]) -> FileEntry:
        """On the first rank of a node, when its ranks have written: write its manifest, and return that file's entry.

        `node`: the folder of the node, which is flushed to disk. `entries`: those of the files in it.
        """
        text = node_manifest(entries)
        write_flushed(self.partial / manifest_of(node), text)
        flush_folder(self.partial / node)
        return CRC.of(text.encode())

    def commit(
        self,
        steps: int,
        entries: dict[str, FileEntry],
        *,
        nodes: Mapping[str, int] = MappingProxyType({}),
        after: float = 0.0,
    ) -> Committed:
        """On rank 0, when all ranks have written: commit the checkpoint.

        `entries`: those of the files of all ranks, without files in the folders of nodes but their manifests. `nodes`:
        the bytes in each such folder. `after`: the time of the checkpoint that this one supersedes, in seconds since
        the epoch.
        """
        # later than `after`, which may be by the clock of another node
        now = max(time.time(), math.nextafter(after, math.inf))
        checkpoint = Committed(path=self.checkpoints / self.uuid, steps=steps, time=now, files=entries, nodes={**nodes})
        FORMAT.commit(self.partial, checkpoint.path, checkpoint.manifest)
        return checkpoint


def _flushed(path: Path) -> FileEntry:
    """Flush a file that a callback wrote, and return its entry. Raises HpcDetError if it is not a regular file."""
    try:
        set_mode(path)
        with open_regular(path) as file:
            disk.flush(file.fileno())
        return checksum(path)
    except OSError as error:
        raise HpcDetError(f"{path}: cannot become part of a checkpoint: {error.strerror}") from None


def _replace_link(path: Path) -> None:
    """Replace a symbolic link by a copy of its target, so that the checkpoint contains all that it needs.

    Raises HpcDetError if the target is not a file.
    """
    if not path.is_file():
        raise HpcDetError(
            f"{path}: a symbolic link to {os.readlink(path)}, which is not a file, cannot become part of a "
            f"checkpoint; write the files themselves"
        )
    write_atomic(path, path.read_bytes())


def new_staging(checkpoints: Path) -> Staging:
    """On rank 0: start a new checkpoint. No other save may be in flight, because its files would be deleted."""
    clear_leftovers(checkpoints)
    staging = Staging(checkpoints, str(uuid.uuid4()))
    make_folder(staging.partial)
    return staging


def clear_leftovers(checkpoints: Path) -> None:
    """Delete the partial folders of killed attempts and cancelled saves."""
    for leftover in checkpoints.glob(".partial-*"):
        disk.remove_tree(leftover)
