"""The fixtures `pbs_lab`, a stand-in PBS of its own for one test, and `any_pbs`, which can be a real one instead."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.labs import networks, pbs_real
from tests.labs.pbs_lab import PbsLab


@pytest.fixture
def pbs_lab(request: pytest.FixtureRequest, no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[PbsLab]:
    """Its commands are on PATH. What left the session of its job, and so would be left behind by PBS, is a failure.

    As an indirect parameter: fields of its `Settings`.
    """
    if pbs_real.ASKED_FOR:
        pytest.skip("needs the stand-in PBS; HPC_DET_REAL_PBS=1 asks for the real one")
    settings = getattr(request, "param", {})
    if settings.get("has_networks") and (reason := networks.available()):
        pytest.skip(reason)
    lab = PbsLab.start(**settings)
    monkeypatch.setenv("PATH", lab.env["PATH"])
    yield lab
    try:
        lab.end_all()
    finally:
        strays = lab.stop()
    if strays:
        pytest.fail("jobs left behind what PBS would not find:\n" + "\n".join(strays), pytrace=False)


@pytest.fixture
def any_pbs(request: pytest.FixtureRequest) -> Iterator[PbsLab]:
    """The PBS on PATH where HPC_DET_REAL_PBS=1 is set, the stand-in everywhere else."""
    if not pbs_real.ASKED_FOR:
        yield request.getfixturevalue("pbs_lab")
        return
    lab = pbs_real.RealPbs()
    yield lab
    lab.stop()
