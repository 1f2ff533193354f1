"""A secret of the user: random bytes in a file that nobody else can read; and small files sealed with it.

The content of a sealed file is behind an HMAC of it, so that it is believed only from this user: pickles above all,
which can run anything when they are read.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from pathlib import Path

from hpc_det.errors import HpcDetError
from hpc_det.node import disk
from hpc_det.node.files import write_atomic, write_first

KEY_BYTES = 32


def derived(key: bytes, label: str) -> bytes:
    """Another key. Whoever holds it learns nothing about `key`, nor about what was derived for other labels."""
    return hmac.digest(key, label.encode(), "sha256")


def user_key(path: Path) -> bytes:
    """The 32 random bytes in `path`, made at the first call. Raises HpcDetError where they cannot be a secret."""
    try:
        if not path.exists():
            disk.make_folder(path.parent, 0o700, parents=True, exist_ok=True)
            write_first(path, secrets.token_bytes(KEY_BYTES))  # every rank may do this at once, and all read the first
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            key = file.read()
    except OSError as error:
        raise HpcDetError(
            f"{path}: {error.strerror}; ranks that exchange objects need a secret there: set HPC_DET_ROOT to a folder "
            f"of yours that you can write and that all nodes see"
        ) from None
    mode, owner, user = stat.S_IMODE(status.st_mode), status.st_uid, os.geteuid()
    if owner != user or mode & 0o077 or len(key) != KEY_BYTES:
        raise HpcDetError(
            f"{path}: {len(key)} bytes, mode {mode:04o}, of user {owner}; a secret has {KEY_BYTES}, mode 0600, of "
            f"user {user}. Remove the file, and a new one is made"
        )
    return key


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
