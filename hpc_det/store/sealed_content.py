"""Small files that are believed only from this user: their content behind an HMAC of it, with a key of the user's.

Pickles above all, which can run anything when they are read.
"""

from __future__ import annotations

import hmac
from pathlib import Path

from hpc_det.errors import HpcDetError
from hpc_det.node.files import write_atomic
from hpc_det.node.key import derived

_MAC_BYTES = 32


def write_with_seal(path: Path, content: bytes, key: bytes) -> None:
    """The file of this name in the folder of this name: the seal does not hold for another one."""
    write_atomic(path, _mac(path, content, key) + content)


def read_with_seal(path: Path, key: bytes) -> bytes:
    """The content. Raises HpcDetError where `write_with_seal` has not written it with this key; OSError without one."""
    whole = path.read_bytes()
    content = whole[_MAC_BYTES:]
    if not hmac.compare_digest(whole[:_MAC_BYTES], _mac(path, content, key)):
        raise HpcDetError(
            f"{path}: does not have this user's seal: it was changed, moved, or written by another user or an older "
            f"hpc_det; it was not read"
        )
    return content


def _mac(path: Path, content: bytes, key: bytes) -> bytes:
    place = f"{path.parent.name}/{path.name}".encode()
    return hmac.digest(derived(key, "content"), len(place).to_bytes(4, "big") + place + content, "sha256")
