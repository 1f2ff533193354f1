from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.gang import Gang
from tests.stub import stub as stub


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[Gang]:
    # the agent's socket lies below TMPDIR, and its path may have 107 bytes at most
    with tempfile.TemporaryDirectory() as tmp:
        gang = Gang(tmp_path / "state", Path(tmp))
        yield gang
        gang.close()
