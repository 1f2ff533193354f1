"""Steps of a loop that does not use `batches`, in one process without a job."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_det.checkpoint.checkpoints import CheckpointContext
from hpc_det.core import init
from hpc_det.core.core import Core
from hpc_det.core.progress import Batch, Epoch, TrainUnit
from hpc_det.store.metrics import read_reports
from tests.core.loops import PASS, Loop, PlainLoop
from tests.pytorch.trials import StopAt


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


def test_the_total_follows_from_passes_over_a_loader_with_a_length(tmp_path: Path) -> None:
    loop = Loop.begin(tmp_path)
    loop.attempt(StopAt(9))
    assert loop.attempt().total == 3 * PASS
    assert {record["total"] for record in read_reports(loop.folder.metrics)} == {3 * PASS}


class OverStream(PlainLoop):
    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.loader = iter([*self.loader, *self.loader, *self.loader])


def test_it_is_unknown_over_a_loader_without_a_length(tmp_path: Path) -> None:
    assert Loop.begin(tmp_path, OverStream).attempt().total is None


class InStages(PlainLoop):
    """Trains for one pass, then up to the third one."""

    units: tuple[TrainUnit, ...] = (Epoch(1), Epoch(3))

    def run(self) -> None:
        for unit in self.units:
            for batch in self.core.batches(self.loader, until=unit):
                self.core.report(self.core.step, {"loss": self.train(batch)})


class InStagesOfBatches(InStages):
    units = (Batch(PASS), Batch(3 * PASS))


@pytest.mark.parametrize("program", [InStages, InStagesOfBatches])
def test_a_greater_length_of_the_same_training_replaces_the_total(tmp_path: Path, program: type[PlainLoop]) -> None:
    loop = Loop.begin(tmp_path, program)
    assert loop.attempt().total == 3 * PASS
    records = read_reports(loop.folder.metrics)
    assert all(record["steps"] <= record["total"] for record in records)
    assert {record["total"] for record in records} == {PASS, 3 * PASS}


def test_a_loop_of_reports_allocates_the_memory_of_its_first_save(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    allocated: list[int] = []
    with init(name=name) as core:
        core.track(count={"n": 1})
        monkeypatch.setattr(CheckpointContext, "allocate", lambda *_: allocated.append(core.step))
        for step in range(1, 10):
            core.report(step, {"loss": 1.0})
        assert allocated == [1, 2, 4, 8]
