from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_det.submit.submitit_pbs.executor import PbsExecutor, _is_pbs
from hpc_det.submit.submitit_pbs.job import PbsJob
from tests.stub import Stub
from tests.submit.submitit_pbs.site import StubSite


@pytest.fixture(autouse=True)
def _installed() -> None:
    """submitit finds the plugin by the entry points that pip has recorded."""
    names = {point.name for point in importlib.metadata.entry_points(group="submitit") if "submitit_pbs" in point.value}
    if names != {"executor", "job_environment"}:
        pytest.fail("this environment does not know submitit's plugin yet: pip install -e .", pytrace=False)


@pytest.fixture
def site(tmp_path: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> Iterator[StubSite]:
    monkeypatch.setattr(PbsJob, "_results_timeout_s", 0)
    monkeypatch.setattr(PbsJob, "watcher", type(PbsJob.watcher)())
    monkeypatch.setenv("SUBMITIT_LOG_LEVEL", "WARNING")
    yield StubSite(tmp_path / "site", stub)
    _is_pbs.cache_clear()


@pytest.fixture
def executor(tmp_path: Path, site: StubSite) -> PbsExecutor:
    folder = tmp_path / "jobs of it's"
    folder.mkdir()
    return PbsExecutor(folder)
