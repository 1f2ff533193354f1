from __future__ import annotations

import importlib
import mmap
import sys
import zlib
from collections.abc import Iterator

import pytest

from hpc_det.checkpoint import crc

MEMORY = mmap.mmap(-1, 3 * mmap.PAGESIZE)
MEMORY[:] = (b"checkpoint" * len(MEMORY))[: len(MEMORY)]


@pytest.fixture(params=["isal", "zlib"])
def checksum(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With isal where this machine has it, and without."""
    if request.param == "zlib":
        monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)
    importlib.reload(crc)
    yield
    monkeypatch.undo()
    importlib.reload(crc)


@pytest.mark.usefixtures("checksum")
@pytest.mark.parametrize("before", [0, 1, 0xFFFFFFFF])
@pytest.mark.parametrize("data", [b"", b"a", memoryview(MEMORY)[5:], bytes(range(256)) * 5000])
def test_it_is_the_checksum_that_zlib_computes(data: bytes | memoryview, before: int) -> None:
    assert crc.crc32(data, before) == zlib.crc32(data, before)
    assert crc.crc32(data) == zlib.crc32(data)
