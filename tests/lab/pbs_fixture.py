"""The fixture `pbs_lab`: a stand-in PBS of its own for one test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab.pbs_lab import PbsLab


@pytest.fixture
def pbs_lab(no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[PbsLab]:
    """Its commands are on PATH. What left the session of its job, and so would be left behind by PBS, is a failure."""
    lab = PbsLab.start()
    monkeypatch.setenv("PATH", lab.env["PATH"])
    yield lab
    try:
        lab.end_all()
    finally:
        strays = lab.stop()
    if strays:
        pytest.fail("jobs left behind what PBS would not find:\n" + "\n".join(strays), pytrace=False)
