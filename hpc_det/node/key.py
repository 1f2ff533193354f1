"""The user's secret key in a private file, and small files that are authenticated with it.

A sealed file begins with an HMAC of its content, so that only content written by this user is read. This matters most
for pickles, since reading a pickle can run any code.
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
    """Return a key derived from `key`. It reveals nothing about `key` or about the keys derived for other labels."""
    return hmac.digest(key, label.encode(), "sha256")


def user_key(path: Path) -> bytes:
    """Return the 32 random bytes in `path`, which the first call creates. Raises HpcDetError if they cannot be a
    secret.
    """
    try:
        if not path.exists():
            disk.make_folder(path.parent, 0o700, parents=True, exist_ok=True)
            write_first(path, secrets.token_bytes(KEY_BYTES))  # if several ranks do so at once, all use the first file
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            key = file.read()
    except OSError as error:
        raise HpcDetError(
            f"{path}: {error.strerror}; ranks that exchange objects need a secret key in this file: set HPC_DET_ROOT "
            f"to your own folder on a file system that all nodes share, with write permission"
        ) from None
    mode, owner, user = stat.S_IMODE(status.st_mode), status.st_uid, os.geteuid()
    if owner != user or mode & 0o077 or len(key) != KEY_BYTES:
        raise HpcDetError(
            f"{path}: {len(key)} bytes, mode {mode:04o}, owned by user {owner}; expected {KEY_BYTES} bytes, mode 0600, "
            f"owned by user {user}. Remove the file; hpc_det creates a new one"
        )
    return key


_MAC_BYTES = 32


def write_with_seal(path: Path, content: bytes, key: bytes) -> None:
    """Write `content` with its seal, which is valid only for this file name in a folder of this name."""
    write_atomic(path, _mac(path, content, key) + content)


def read_with_seal(path: Path, key: bytes) -> bytes:
    """Return the content of a sealed file. Raises HpcDetError if the seal is wrong, OSError if the file cannot be
    read.
    """
    whole = path.read_bytes()
    content = whole[_MAC_BYTES:]
    if not hmac.compare_digest(whole[:_MAC_BYTES], _mac(path, content, key)):
        raise HpcDetError(
            f"{path}: not read, because its seal is not this user's: the file was changed, moved, or written by "
            f"another user or by an older hpc_det"
        )
    return content


def _mac(path: Path, content: bytes, key: bytes) -> bytes:
    # The name is part of the HMAC, so a sealed file cannot be put in the place of another one.
    place = f"{path.parent.name}/{path.name}".encode()
    return hmac.digest(derived(key, "content"), len(place).to_bytes(4, "big") + place + content, "sha256")
