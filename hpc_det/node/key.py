"""A secret of the user: random bytes in a file that nobody else can read."""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from pathlib import Path

from hpc_det.errors import HpcDetError
from hpc_det.node import disk
from hpc_det.node.files import write_first

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
