"""The output files of a batch inference: staged by all ranks, published when the checkpoint of their records exists.

outputs/part-FIRST-LAST/rank-R/...    the outputs of records FIRST to LAST - 1, in the order of the data set
        .stage-ID-FIRST/rank-R/...    the outputs of records that no checkpoint counts as done yet
        .replaced-ID-part-.../        outputs of records that were processed again; see `OutputFolder.recover`
        sources.json                  the checkpoints and model versions that the processor reported

A commit has three steps: all ranks flush their staged files; a checkpoint is committed that names the stage and its
part; rank 0 renames the stage to the part. After a kill before the second step the next attempt deletes the stage and
processes its records again. After a kill before the third step it makes the rename. So a part is complete whenever it
is visible, and the parts contain each record once.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_det.node import disk
from hpc_det.node.files import flush_folder, flush_tree, make_folders
from hpc_det.node.json_files import read_json, write_json

_STAGE, _REPLACED = ".stage-", ".replaced-"
_PART = re.compile(r"part-(\d{12})-(\d{12})")
SOURCES = "sources.json"


@dataclass(frozen=True, order=True)
class Part:
    """A published folder of outputs."""

    first: int
    """Number of the first record."""
    last: int
    """Number of the last record plus one. Equal to `first` for files that `on_finish` wrote."""
    folder: Path

    @property
    def ranks(self) -> list[Path]:
        """The folders of the ranks that have written files, in the order of ranks."""
        found = (path for path in self.folder.glob("rank-*") if path.is_dir())
        return sorted(found, key=lambda path: int(path.name.removeprefix("rank-")))


def part_name(first: int, last: int) -> str:
    return f"part-{first:012}-{last:012}"


def parts_in(folder: Path) -> list[Part]:
    """Return the published parts, in the order of the data set."""
    found = ((_PART.fullmatch(path.name), path) for path in folder.glob("part-*"))
    return sorted(Part(int(match[1]), int(match[2]), path) for match, path in found if match)


class OutputFolder:
    """The outputs of one run, as one rank writes them. Rank 0 alone publishes and recovers."""

    def __init__(self, folder: Path, *, rank: int, attempt: str) -> None:
        """`attempt`: an id that no other attempt of this run has, the same on all ranks."""
        self.folder = folder
        self._rank = rank
        self._attempt = attempt
        self._stage: Path | None = None

    def begin(self, first: int) -> None:
        """Stage the files that are written from now on for the part that starts with record `first`."""
        self._stage = self.folder / f"{_STAGE}{self._attempt}-{first:012}"

    @property
    def stage(self) -> str:
        """The name of the stage."""
        return self._open.name

    @property
    def own(self) -> Path:
        """The folder for the files of this rank, which exists."""
        own = self._open / f"rank-{self._rank}"
        if not own.is_dir():
            make_folders(own)
        return own

    def flush(self) -> bool:
        """Flush the staged files of this rank to disk, and return whether there are any."""
        own = self._open / f"rank-{self._rank}"
        if not own.is_dir():
            return False
        flush_tree(own)
        return True

    def seal(self) -> None:
        """On rank 0, when all ranks have flushed: make the names of their folders durable."""
        make_folders(self._open)  # also refreshes what a client of NFS remembers of the folder
        flush_folder(self._open)
        flush_folder(self.folder)

    def publish(self, stage: str, part: str) -> None:
        """Rename the stage to the part, unless an earlier attempt did so."""
        try:
            disk.rename(self.folder / stage, self.folder / part)
        except FileNotFoundError:
            return
        flush_folder(self.folder)

    def recover(self, done: int, stage: str | None, part: str | None) -> list[str]:
        """Continue after a checkpoint that counts `done` records and names a stage and a part; None: it names none.

        Complete its commit, delete the stages of killed attempts, and hide parts with later records: they exist if the
        newest checkpoint was damaged or deleted. Returns the names of these parts.
        """
        if not self.folder.is_dir():
            return []
        if stage and part:
            self.publish(stage, part)
        for leftover in self.folder.glob(f"{_STAGE}*"):
            disk.remove_tree(leftover)
        later = [each for each in parts_in(self.folder) if each.first >= done and each.folder.name != part]
        for each in later:
            disk.rename(each.folder, self.folder / f"{_REPLACED}{uuid.uuid4().hex[:8]}-{each.folder.name}")
        return [each.folder.name for each in later]

    def add_source(self, kind: str, source: Mapping[str, Any]) -> None:
        """On rank 0: record a checkpoint or a model version from which the outputs come, once each."""
        make_folders(self.folder)
        known = read_json(self.folder / SOURCES) or {}
        listed = known.setdefault(kind, [])
        if source not in listed:
            listed.append(dict(source))
            write_json(self.folder / SOURCES, known)

    @property
    def _open(self) -> Path:
        assert self._stage, "call begin before"
        return self._stage


def files_of(part: Part, pattern: str) -> Iterator[Path]:
    """Yield the files of a part that match the glob pattern, by rank and then by name."""
    for rank in part.ranks:
        yield from sorted(path for path in rank.rglob(pattern) if path.is_file())
