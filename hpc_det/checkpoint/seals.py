"""Seals of files and manifests: a CRC-32 detects damage; an HMAC, which needs the run's key, also detects tampering.

Each block of a file has a digest, and a file's entry in the manifest is computed from the digests of all its blocks. So
threads, ranks and nodes can process blocks in any order. A manifest contains its own seal.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from hpc_det.node.key import derived

try:  # about five times as fast as zlib's, so that training keeps its cores; not every machine has a wheel
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

Digest = Any
"""Digest of one block: an int for a CRC-32, bytes for an HMAC."""


class Entry(Protocol):
    """The entry of a file in a manifest."""

    @property
    def size(self) -> int:
        """Size in bytes."""


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """The entry of a file in the manifest of a checkpoint."""

    size: int
    crc32: int


class HmacEntry(NamedTuple):
    """The entry of a file in the manifest of a snapshot."""

    size: int
    mac: str
    """HMAC in hexadecimal digits."""


E = TypeVar("E", bound=Entry)


class Seal(ABC, Generic[E]):
    """One way to seal files and manifests."""

    manifest_key: ClassVar[str]
    """The manifest key that contains the seal of the manifest."""
    misfit: ClassVar[str]
    """The error text for a manifest whose seal does not match its content."""
    is_slow: ClassVar[bool]
    """Whether one core computes digests no faster than a disk writes."""
    read_bytes: int
    """Block size for reading, in bytes; only the last block of a file is shorter."""
    written_bytes: int
    """Block size for writing, in bytes."""

    @abstractmethod
    def digest(self, pieces: Iterable[memoryview]) -> Digest:
        """Return the digest of the block that consists of `pieces`."""

    @abstractmethod
    def entry(self, blocks: Iterable[tuple[int, Digest]]) -> E:
        """Return the entry of a file, given the size in bytes and the digest of each of its blocks, in order."""

    def of(self, content: bytes) -> E:
        """Return the entry of a file with this content."""
        size = self.read_bytes
        blocks = [memoryview(content)[offset : offset + size] for offset in range(0, len(content), size)]
        return self.entry((len(block), self.digest([block])) for block in blocks)

    @abstractmethod
    def difference(self, expected: E, found: E) -> str | None:
        """Describe how the content differs, for a file of the expected size; None if it does not."""

    @abstractmethod
    def _of_manifest(self, content: bytes) -> int | str:
        pass

    def sealed(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Return `manifest` with the seal of its content."""
        content = {name: value for name, value in manifest.items() if name != self.manifest_key}
        return {**content, self.manifest_key: self._of_manifest(json.dumps(content, sort_keys=True).encode())}

    def fits(self, manifest: Mapping[str, Any]) -> bool:
        """Return whether the seal in `manifest` matches its content."""
        found, expected = manifest.get(self.manifest_key), self.sealed(manifest)[self.manifest_key]
        return type(found) is type(expected) and hmac.compare_digest(str(found).encode(), str(expected).encode())


class CrcSeal(Seal[FileEntry]):
    """CRC-32: detects damage by a disk or a crash."""

    manifest_key = "crc32"
    misfit = "torn: its checksum does not match its content"
    is_slow = False
    read_bytes = 1 << 24
    written_bytes = 1 << 21

    def digest(self, pieces: Iterable[memoryview]) -> int:
        crc = 0
        for piece in pieces:
            crc = crc32(piece, crc)
        return crc

    def entry(self, blocks: Iterable[tuple[int, int]]) -> FileEntry:
        size, crc = 0, 0
        for block_bytes, digest in blocks:
            size, crc = size + block_bytes, crc_of_both(crc, digest, block_bytes)
        return FileEntry(size=size, crc32=crc)

    def difference(self, expected: FileEntry, found: FileEntry) -> str | None:
        if found == expected:
            return None
        return f"crc32 {found.crc32:08x}, the manifest says {expected.crc32:08x}"

    def _of_manifest(self, content: bytes) -> int:
        return crc32(content)


CRC = CrcSeal()


class HmacSeal(Seal[HmacEntry]):
    """HMAC-SHA256 over the SHA-256 digests of all blocks: only a process with the key can create a valid one."""

    manifest_key = "mac"
    misfit = "its seal does not match this run's key: the manifest has changed, or the key has"
    is_slow = True  # 1.5 GB/s, with SHA instructions
    read_bytes = written_bytes = 1 << 22
    """Part of the file format: a seal computed with another block size does not match."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def digest(self, pieces: Iterable[memoryview]) -> bytes:
        sha256 = hashlib.sha256()
        for piece in pieces:
            sha256.update(piece)
        return sha256.digest()

    def entry(self, blocks: Iterable[tuple[int, bytes]]) -> HmacEntry:
        whole = [(size, digest) for size, digest in blocks if size]
        # a derived key: no other kind of HMAC with the same run key can be valid here
        mac = hmac.new(derived(self._key, "files"), b"".join(digest for _, digest in whole), "sha256")
        return HmacEntry(sum(size for size, _ in whole), mac.hexdigest())

    def difference(self, expected: HmacEntry, found: HmacEntry) -> str | None:
        # compare_digest: its time does not depend on the content, so that a forger cannot find a seal digit by digit
        is_same = hmac.compare_digest(found.mac.encode(), str(expected.mac).encode())
        return None if is_same else "the content has changed, its seal does not fit"

    def _of_manifest(self, content: bytes) -> str:
        """Return the HMAC with a separate derived key, so that the seal of a file is never valid for a manifest."""
        return HmacSeal(derived(self._key, "manifests")).of(content).mac


# --- crc32 is the remainder of a polynomial over GF(2), whose highest bit stands for x to the power of 0

_ONE = 1 << 31
_POLYNOMIAL = 0xEDB88320  # of CRC-32, as zlib and the zip format use it


def crc_of_both(first: int, second: int, second_bytes: int) -> int:
    """Return the crc32 of two concatenated parts, given the crc32 of each and the size of the second in bytes.

    Python's zlib lacks this function of the C library (crc32_combine). The second part shifts the first one: its crc32
    is multiplied by x to the power of the number of bits in the second part.
    """
    return _product(first, _shift(second_bytes)) ^ second


@lru_cache
def _shift(count: int) -> int:
    """Return x to the power of the number of bits in `count` bytes."""
    power, square = _ONE, _ONE >> 8
    while count:
        if count & 1:
            power = _product(power, square)
        square = _product(square, square)
        count >>= 1
    return power


def _product(one: int, other: int) -> int:
    product = 0
    while one:
        if one & _ONE:
            product ^= other
        one = (one << 1) & 0xFFFFFFFF
        other = (other >> 1) ^ (_POLYNOMIAL if other & 1 else 0)
    return product
