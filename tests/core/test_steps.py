"""Steps of a loop that does not use `batches`, in one process without a job."""

from __future__ import annotations

import pytest

from hpc_det.core import init
from hpc_det.store.metrics import read_reports


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


def test_the_total_is_shown_beside_the_steps(name: str) -> None:
    with init(name=name) as core:
        assert core.total is None
        core.total = 7
        core.report(3, {"loss": 1.0})
        folder = core.info.folder
    (record,) = [each for each in read_reports(folder / "metrics.jsonl") if each["kind"] == "training"]
    assert (record["steps"], record["total"]) == (3, 7)


def test_only_reports_that_every_rank_may_make_count_steps(name: str) -> None:
    with init(name=name) as core:
        core.report(5, {"speed": 1.0}, group="speed")
        assert core.step == 0
        core.report(3, {"loss": 1.0})
        assert core.step == 3


def test_a_loop_of_steps_is_seen_by_the_hang_detector(name: str) -> None:
    phases = []
    with init(name=name) as core:
        with core.stepping():
            core.should_stop()
            phases.append(core._run.stop.progress.phase)
        phases.append(core._run.stop.progress.phase)
    assert phases == ["training", "between steps"]


@pytest.mark.parametrize("test", [False, True])
def test_a_run_knows_that_it_is_a_test(test: bool, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPC_DET_TEST", "1" if test else "")
    with init(name=name) as core:
        assert core.info.test is test
