"""Files with a seal, HMAC-SHA256: what only somebody with the key of the run can have written.

The seal is made of the SHA-256 digests of all blocks of the file, in order, so that several threads can make one.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from hpc_det.node import disk
from hpc_det.node.key import derived
from hpc_det.store.direct import past_the_cache, write_at

_BLOCK = 2**22
"""Bytes of a digest. It is a part of every seal: none that was made with another number fits."""
_THREADS = 3
"""Some hash while another one writes: a core hashes no faster than a disk writes, 1.5 GB/s with SHA instructions."""


class Sealed(NamedTuple):
    """What a manifest says of a file."""

    size: int
    """In bytes."""
    mac: str
    """In hexadecimal digits."""


class Superseded(Exception):
    """A copy that nobody wants any more has been given up."""


def write_sealed(
    content: memoryview, path: Path, key: bytes, is_superseded: Callable[[], bool] = lambda: False
) -> Sealed:
    """Write `content` to a new file `path`, and flush it to disk; fastest from memory that begins with a page.

    Raises Superseded soon after `is_superseded` has begun to say so.
    """
    target = disk.open_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    def write(offset: int) -> bytes:
        if is_superseded():
            raise Superseded
        block = content[offset : offset + _BLOCK]
        digest = hashlib.sha256(block).digest()
        write_at(target, block, offset)
        return digest

    try:
        past_the_cache(target)
        sealed = _sealed(len(content), write, key)
        disk.flush(target)
    finally:
        os.close(target)
    return sealed


def seal_of(path: Path, key: bytes) -> Sealed:
    with open(path, "rb") as file:
        descriptor = file.fileno()
        size = os.fstat(descriptor).st_size
        return _sealed(size, lambda offset: hashlib.sha256(_read(descriptor, offset)).digest(), key)


def seal(content: bytes, key: bytes) -> Sealed:
    blocks = (content[offset : offset + _BLOCK] for offset in range(0, len(content), _BLOCK))
    return Sealed(len(content), _mac((hashlib.sha256(block).digest() for block in blocks), key))


def _sealed(size: int, digest: Callable[[int], bytes], key: bytes) -> Sealed:
    """`digest` is asked by several threads for that of the block at an offset."""
    with ThreadPoolExecutor(_THREADS, "seal") as pool:
        return Sealed(size, _mac(pool.map(digest, range(0, size, _BLOCK)), key))


def _mac(digests: Iterable[bytes], key: bytes) -> str:
    """No seal of another kind that is made with the same key can stand for one of a file."""
    return hmac.new(derived(key, "files"), b"".join(digests), "sha256").hexdigest()


_own = threading.local()


def _read(file: int, offset: int) -> memoryview:
    """The block there, in memory of this thread, into which it will read the next one, too."""
    if not hasattr(_own, "memory"):
        _own.memory = memoryview(bytearray(_BLOCK))
    size = 0
    while read := os.preadv(file, [_own.memory[size:]], offset + size):
        size += read
    block: memoryview = _own.memory[:size]
    return block
