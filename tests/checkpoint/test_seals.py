from __future__ import annotations

import importlib.util
import json
import mmap
import sys
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_det.checkpoint import seals
from hpc_det.checkpoint.seals import CRC, E, FileEntry, HmacEntry, HmacSeal, Seal, crc_of_both

KEY = bytes(range(32))
HMAC = HmacSeal(KEY)
LONG = bytes(range(256)) * (2**14) * 2 + b"12345"
"""Three blocks of an HMAC; the last one is short."""


def entry(seal: Seal[E], content: bytes) -> E:
    """Return the entry of a file with this content."""
    parts = [content[offset : offset + seal.read_bytes] for offset in range(0, len(content), seal.read_bytes)]
    return seal.entry((len(part), seal.digest([memoryview(part)])) for part in parts)


# --- what older versions have written


def test_the_entries_are_those_that_older_versions_wrote() -> None:
    assert entry(CRC, LONG) == FileEntry(size=8388613, crc32=3674458933)
    long = "98eeaa7437cef6dd8def25db293164093769a498cf24d7643ce6add190aa52eb"
    assert entry(HMAC, LONG) == HmacEntry(8388613, long)
    empty = "b4cc3a860672c2a53832a75893d176a4678c80224b360f7fadfe0217a8f73ac8"
    assert entry(HMAC, b"") == HmacEntry(0, empty)
    assert HMAC.entry([(0, HMAC.digest([]))]) == HmacEntry(0, empty), "as a reader finds it, who looks at every file"


RECORDED: list[tuple[Seal[Any], dict[str, Any]]] = [
    (
        CRC,
        {"uuid": "u", "steps_completed": 10, "time": 1.5, "files": {"a": {"size": 1, "crc32": 2}}, "crc32": 864292278},
    ),
    (
        HMAC,
        {
            "number": 1,
            "epochs_done": 2,
            "calls": 3,
            "round": {},
            "size": 1,
            "own": [8],
            "files": {
                "state.pt": [5, "5e89d7b4d1f6b474ea1ff9231dd00d68b32000f4c5bd8933d8908359a121f439"],
                "own": [8, "f490d259cc1d9c1c9fdff43567f1f1b8be1e91cb78ede106c562fd4129d4fc5f"],
            },
            "mac": "49605c6e4643207df1a4f3eb7b94b0d8a963f4d5ab34640c9280047c3f1ee94e",
        },
    ),
]


@pytest.mark.parametrize(("seal", "manifest"), RECORDED)
def test_the_manifests_of_older_versions_fit(seal: Seal[Any], manifest: dict[str, Any]) -> None:
    assert seal.fits(json.loads(json.dumps(manifest)))
    assert seal.sealed(manifest) == manifest
    assert not seal.fits({**manifest, "time": 9})
    assert not seal.fits({**manifest, seal.manifest_key: None})
    assert not seal.fits({name: value for name, value in manifest.items() if name != seal.manifest_key})


# --- crc32

MEMORY = mmap.mmap(-1, 3 * mmap.PAGESIZE)
MEMORY[:] = (b"checkpoint" * len(MEMORY))[: len(MEMORY)]


@pytest.fixture(params=["isal", "zlib"])
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the module with isal, if it is installed, and without."""
    if request.param == "zlib":
        monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)
    spec = importlib.util.find_spec(seals.__name__)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.mark.parametrize("before", [0, 1, 0xFFFFFFFF])
@pytest.mark.parametrize("data", [b"", b"a", memoryview(MEMORY)[5:], bytes(range(256)) * 5000])
def test_it_is_the_checksum_that_zlib_computes(module: Any, data: bytes | memoryview, before: int) -> None:
    assert module.crc32(data, before) == zlib.crc32(data, before)
    assert module.crc32(data) == zlib.crc32(data)


@given(st.binary(), st.binary())
def test_the_checksum_of_two_parts_is_that_of_the_whole(first: bytes, second: bytes) -> None:
    both = crc_of_both(zlib.crc32(first), zlib.crc32(second), len(second))
    assert both == zlib.crc32(first + second)


@pytest.mark.integration
def test_the_checksum_of_parts_of_any_length() -> None:
    zeros = bytes(1 << 20)
    crc_of_zeros = zlib.crc32(zeros)
    crc, length = zlib.crc32(b"a"), 0
    for _ in range(4096):
        crc, length = crc_of_both(crc, crc_of_zeros, len(zeros)), length + len(zeros)
    once = crc_of_both(zlib.crc32(b"a"), 0, 0)
    assert once == zlib.crc32(b"a")
    nothing = crc_of_both(0, crc_of_zeros, len(zeros))
    assert nothing == crc_of_zeros
    four_gib_of_zeros = 0
    for _ in range(4096):
        four_gib_of_zeros = crc_of_both(four_gib_of_zeros, crc_of_zeros, len(zeros))
    assert crc == crc_of_both(zlib.crc32(b"a"), four_gib_of_zeros, length)


# --- HMAC


@pytest.mark.parametrize("place", [0, 2**22, len(LONG) - 1])
def test_an_hmac_shows_one_changed_bit_and_another_key(place: int) -> None:
    changed = bytearray(LONG)
    changed[place] ^= 1
    assert HMAC.difference(entry(HMAC, LONG), entry(HMAC, LONG)) is None
    assert HMAC.difference(entry(HMAC, LONG), entry(HMAC, bytes(changed)))
    assert entry(HmacSeal(KEY[::-1]), LONG).mac != entry(HMAC, LONG).mac


def test_an_hmac_shows_blocks_that_have_changed_places() -> None:
    first, second = b"1" * 2**22, b"2" * 2**22
    assert entry(HMAC, first + second).mac != entry(HMAC, second + first).mac
