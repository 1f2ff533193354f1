from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.gang import Gang
from tests.stub import stub as stub


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[Gang]:
    # the agent's socket is below TMPDIR, and the path of a Unix socket is limited to 107 bytes
    with tempfile.TemporaryDirectory() as tmp:
        gang = Gang(tmp_path / "state", Path(tmp))
        yield gang
        gang.close()
