"""Files that a disk has damaged: bits that were flipped, ends that are missing, zeros."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

BITS = (0x01, 0x80)
"""One that leaves a text a text, and one that does not."""


class Damage(NamedTuple):
    what: str
    done: Callable[[bytes], bytes]

    def to(self, path: Path) -> None:
        """Not to other names of the same file: checkpoints share those of their code."""
        content, mode = self.done(path.read_bytes()), path.stat().st_mode
        path.unlink()
        path.write_bytes(content)
        path.chmod(mode)


def damages(size: int) -> Iterator[Damage]:
    """To a file of so many bytes."""
    for offset in sorted({0, size // 3, size // 2, size - 2, size - 1} & {*range(size)}):
        for bit in BITS:
            yield Damage(f"bit {bit:#x} at {offset}", lambda content, at=offset, bit=bit: _flipped(content, at, bit))  # type: ignore[misc]
    for left in sorted({0, size // 2, size - 1} & {*range(size)}):
        yield Damage(f"cut to {left}", lambda content, left=left: content[:left])  # type: ignore[misc]
    yield Damage("zeros at the end", lambda content: content[: len(content) // 2].ljust(len(content), b"\0"))


def _flipped(content: bytes, offset: int, bit: int) -> bytes:
    return content[:offset] + bytes([content[offset] ^ bit]) + content[offset + 1 :]


def files_in(folder: Path) -> list[Path]:
    """All that have content, hidden ones too."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
