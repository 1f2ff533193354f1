"""The fixtures `pbs_lab`, a separate stand-in PBS for each test, and `any_pbs`, which can be a real one instead."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.labs import networks, pbs_real
from tests.labs.pbs_lab import PbsLab


@pytest.fixture
def pbs_lab(request: pytest.FixtureRequest, no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[PbsLab]:
    """Yield a stand-in PBS, with its commands on PATH. Fail if a process left the session of its job: PBS would not end
    it.

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
    """Yield the PBS on PATH if HPC_DET_REAL_PBS=1 is set, otherwise the stand-in."""
    if not pbs_real.ASKED_FOR:
        yield request.getfixturevalue("pbs_lab")
        return
    lab = pbs_real.RealPbs()
    yield lab
    lab.stop()
