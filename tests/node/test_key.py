"""The user's secret; tests/distributed/test_sealed.py covers processes that create it at the same time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_det.errors import HpcDetError
from hpc_det.node.key import user_key
from tests.facts import refused


def test_a_wide_umask_opens_no_key(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        user_key(tmp_path / "key")
    finally:
        os.umask(before)
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o602])
def test_a_key_that_others_can_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    user_key(tmp_path / "key")
    (tmp_path / "key").chmod(mode)
    with refused(HpcDetError, tmp_path / "key", f"{mode:04o}", "0600"):
        user_key(tmp_path / "key")


def test_a_key_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user_key(tmp_path / "key")
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with refused(HpcDetError, tmp_path / "key", f"user {me}", f"user {me + 1}"):
        user_key(tmp_path / "key")


def test_a_torn_key_is_refused(tmp_path: Path) -> None:
    user_key(tmp_path / "key")
    (tmp_path / "key").write_bytes(b"short")
    with refused(HpcDetError, tmp_path / "key", 5, 32):
        user_key(tmp_path / "key")
