from __future__ import annotations

from pathlib import Path

import pytest

from hpc_det.sgd.elastic import agents
from tests.sgd.capacity.driver import STAND_IN, Run
from tests.stub import stub as stub


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.make(tmp_path / "run of it's 100%")


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the code under test start the stand-in instead of the real node agent."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    monkeypatch.setattr(agents, "MODULE", STAND_IN)
