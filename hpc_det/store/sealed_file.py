"""Files with a seal, HMAC-SHA256: what only somebody with the key of the run can have written."""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hpc_det.store.key import derived

_CHUNK = 2**22


class Sealed(NamedTuple):
    """What a manifest says of a file."""

    size: int
    """In bytes."""
    mac: str
    """In hexadecimal digits."""


def copy_sealed(source: int, path: Path, key: bytes) -> Sealed:
    """Write the file behind the descriptor `source`, from its beginning, to a new file `path`, and flush it to disk.

    The descriptor's own position stays where it is: others may share it.
    """
    mac, size = _mac(key), 0
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0) as file:
        for chunk in _chunks(source):
            mac.update(chunk)
            size += len(chunk)
            while chunk:
                chunk = chunk[file.write(chunk) :]
        os.fsync(file.fileno())
    return Sealed(size, mac.hexdigest())


def seal_of(path: Path, key: bytes) -> Sealed:
    mac, size = _mac(key), 0
    with open(path, "rb") as file:
        for chunk in _chunks(file.fileno()):
            mac.update(chunk)
            size += len(chunk)
    return Sealed(size, mac.hexdigest())


def seal(content: bytes, key: bytes) -> Sealed:
    mac = _mac(key)
    mac.update(content)
    return Sealed(len(content), mac.hexdigest())


def _mac(key: bytes) -> hmac.HMAC:
    """No seal of another kind that is made with the same key can stand for one of a file."""
    return hmac.new(derived(key, "files"), digestmod="sha256")


def _chunks(descriptor: int) -> Iterator[memoryview]:
    buffer, offset = memoryview(bytearray(_CHUNK)), 0
    while size := os.preadv(descriptor, [buffer], offset):
        yield buffer[:size]
        offset += size
