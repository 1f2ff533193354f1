"""Rank 0 reports, commits and takes part in the search without the other ranks."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from hpc_det.checkpoint.committed import committed
from hpc_det.checkpoint.retention import Policy
from hpc_det.core.chief import RESERVED, Chief
from hpc_det.core.run import Run
from hpc_det.distributed.collectives import Distributed
from hpc_det.distributed.metrics import MetricsLog
from hpc_det.distributed.preempt import StopAgreement, give_notice
from hpc_det.node.json_files import read_json
from hpc_det.store.folders import TrialFolder
from hpc_det.store.metrics import read_reports
from tests.distributed.ranks import OnRanks
from tests.facts import refused


class OfSearch:
    """A search that requests these lengths, one after the other."""

    def __init__(self, *lengths: int, comes_back: bool = True, compares: bool = True) -> None:
        self.lengths = [*lengths]
        self.values: list[float | None] = []
        self.comes_back = comes_back
        self.is_comparing = compares
        self.is_ended = False
        self.last: tuple[float | None, int] | None = None

    def on_rank_0_alone(self) -> OfSearch:
        return self

    def compares(self) -> bool:
        return self.is_comparing

    def has_work(self) -> bool:
        return bool(self.lengths)

    def until(self) -> int | None:
        return self.lengths[0] if self.lengths else None

    def report(self, value: float | None, batches: int | None = None) -> int | None:
        self.values.append(value)
        del self.lengths[0]
        return self.until()

    def end(self, value: float | None = None, batches: int = 0) -> None:
        self.is_ended = True
        self.last = value, batches

    def may_come_back(self) -> bool:
        return self.comes_back


def folder_at(path: Path) -> TrialFolder:
    folder = TrialFolder(path / "1")
    folder.checkpoints.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def chief(path: Path, search: OfSearch | None = None, **config: Any) -> Iterator[tuple[Chief, StopAgreement]]:
    distributed, folder = Distributed(), folder_at(path)
    with ExitStack() as ends:
        stop = StopAgreement(distributed.messages)
        ends.callback(stop.close)
        ends.callback(distributed.leave)
        spec = {"experiment_id": 0, "trial_id": 1, "trial_seed": 3, "hparams": {}, "config": config}
        run = Run(spec=spec, folder=folder, attempt=1, distributed=distributed, stop=stop, log=MetricsLog(folder, 1))
        if search:
            job = Job(search)
            object.__setattr__(run, "job", job)
        yield Chief(run, tensorboard=False), stop


class Job:
    code = None
    mirror = None
    grace_s = None

    def __init__(self, search: OfSearch) -> None:
        self.searcher = search

    def retention(self) -> Any:
        return Policy()


SEARCHER: dict[str, Any] = {"searcher": {"metric": "loss", "max_length": {"batches": 100}}}
EPOCHS: dict[str, Any] = {"searcher": {"metric": "loss", "max_length": {"epochs": 8}}}


def test_a_checkpoint_contains_the_files_of_its_block_and_is_the_next_ones_beginning(tmp_path: Path) -> None:
    metadata = {"note": "first"}
    with chief(tmp_path) as (first, _), first.checkpoint(7, metadata) as (path, uuid):
        (path / "state").write_text("7")
        metadata["steps_completed"] = "7"
    (only,) = committed(folder_at(tmp_path).checkpoints)
    assert only.uuid == uuid
    assert (only.steps, (only.path / "state").read_text(), set(only.files) - set(RESERVED)) == (
        7,
        "7",
        {"state", "metadata.json"},
    )
    assert json.loads((only.path / "metadata.json").read_text())["note"] == "first"
    with chief(tmp_path) as (second, _):
        assert second.steps == 7


def test_a_block_that_raises_commits_nothing(tmp_path: Path) -> None:
    with chief(tmp_path) as (first, _):
        with pytest.raises(ZeroDivisionError), first.checkpoint(7, {}):
            1 / 0  # noqa: B018
        assert not committed(folder_at(tmp_path).checkpoints)
        with first.checkpoint(8, {}) as (path, _):
            (path / "state").write_text("8")
    assert [each.steps for each in committed(folder_at(tmp_path).checkpoints)] == [8]


@pytest.mark.parametrize("name", RESERVED)
def test_a_file_with_a_name_of_hpc_det_is_refused(tmp_path: Path, name: str) -> None:
    with chief(tmp_path) as (first, _):
        with refused(Exception, name), first.checkpoint(7, {}) as (path, _):
            (path / name).write_text("mine")
        assert not committed(folder_at(tmp_path).checkpoints)


def test_outside_a_job_every_checkpoint_is_kept(tmp_path: Path) -> None:
    with chief(tmp_path) as (first, _):
        for step in range(1, 6):
            with first.checkpoint(step, {}) as (path, _):
                (path / "state").write_text(str(step))
        first.finish(stopped=False)
    assert len(committed(folder_at(tmp_path).checkpoints)) == 5


def test_reports_are_written_with_their_group(tmp_path: Path) -> None:
    with chief(tmp_path, **SEARCHER) as (first, _):
        first.report(5, {"loss": 2.0})
        first.report_progress(0.5)
        first.report(10, {"loss": 1.0}, group="validation")
        first.report(10, {"words": 3}, group="other")
        first.finish(stopped=False)
    found = [(each["kind"], each["steps"], each["total"]) for each in read_reports(folder_at(tmp_path).metrics)]
    assert found == [("training", 5, None), ("validation", 10, 10)]
    assert len(folder_at(tmp_path).groups.read_text().splitlines()) == 1


def test_one_validation_answers_every_length_that_it_has_reached(tmp_path: Path) -> None:
    search = OfSearch(10, 20, 40)
    with chief(tmp_path, search, **SEARCHER) as (first, stop):
        first.report(25, {"loss": 2.0}, group="validation")
        first.report_to_search(2.0, at=25)
        assert (search.values, first.requested, first.is_stopped_by_search) == ([2.0, 2.0], 40, False)
        first.report(40, {"loss": 1.0}, group="validation")
        first.report_to_search(1.0, at=40)
        assert first.is_stopped_by_search
        stop.wait_for_proposal()
        assert stop.should_stop()


def test_a_length_that_is_reported_as_completed_is_one_report(tmp_path: Path) -> None:
    search = OfSearch(10, 20)
    with chief(tmp_path, search, **SEARCHER) as (first, _):
        first.report_to_search(3.0)
        first.report_to_search(None)
        assert search.values[0] == 3.0
        assert math.isnan(search.values[1] or 0.0)


@pytest.mark.parametrize("compares", [True, False])
def test_a_program_that_ends_by_itself_gives_the_search_its_last_validation(tmp_path: Path, compares: bool) -> None:
    search = OfSearch(100, compares=compares)
    with chief(tmp_path, search, **SEARCHER) as (first, _):
        first.report(5, {"loss": 2.0}, group="validation")
        first.report(7, {"loss": 1.0})
        first.finish(stopped=False)
    assert search.last == (2.0, 5)


@pytest.mark.parametrize(
    ("search", "stopped", "outcome"),
    [
        (None, False, "finished"),
        (None, True, "stopped"),
        (OfSearch(10), True, "stopped"),
        (OfSearch(), True, "waiting"),
        (OfSearch(comes_back=False), True, "finished"),
        (OfSearch(10), False, "finished"),
    ],
)
def test_the_outcome(tmp_path: Path, search: OfSearch | None, stopped: bool, outcome: str) -> None:
    with chief(tmp_path, search, **SEARCHER) as (first, _):
        first.finish(stopped=stopped)
    assert (read_json(folder_at(tmp_path).outcome) or {})["kind"] == outcome
    if search and search.lengths:
        assert search.is_ended is not stopped


@pytest.mark.parametrize(
    ("config", "hparams", "metrics", "trained"),
    [
        (SEARCHER, {}, {}, 30),
        (SEARCHER, {}, {"batches": 7}, 7),
        (EPOCHS, {}, {"epochs": 3}, 3),
        ({"searcher": {"max_length": {"records": 500}}}, {"global_batch_size": 10}, {}, 300),
    ],
)
def test_how_long_a_trial_has_trained(
    tmp_path: Path, config: dict[str, Any], hparams: dict[str, Any], metrics: dict[str, Any], trained: int
) -> None:
    with chief(tmp_path, **config) as (first, _):
        first._run.spec["hparams"] = hparams
        assert first.trained(30, metrics) == trained


def test_without_the_epochs_a_search_that_counts_them_cannot_compare(tmp_path: Path) -> None:
    with chief(tmp_path, **EPOCHS) as (first, _), refused(Exception, "epochs"):
        first.trained(30, {"loss": 1.0})


def stop_of_the_search(distributed: Distributed) -> list[bool]:
    """Return the answers of ticks; notice of a stop is given on rank 0 between the first two."""
    stop, answers = StopAgreement(distributed.messages), []
    for tick in range(3):
        if tick == 1 and distributed.is_chief:
            give_notice(distributed.messages)
            stop.wait_for_proposal()
        distributed.barrier()
        if tick == 1:
            stop.wait_for_proposal()
        answers.append(stop.should_stop())
        if answers[-1]:
            break
    distributed.barrier()
    stop.close()
    return answers


def test_ranks_that_wait_for_the_proposal_stop_at_the_same_tick(on_ranks: OnRanks) -> None:
    assert on_ranks(2, stop_of_the_search) == [[False, True], [False, True]]


def test_a_wait_for_a_proposal_returns_when_there_is_one() -> None:
    distributed = Distributed()
    stop = StopAgreement(distributed.messages)
    waits = threading.Thread(target=stop.wait_for_proposal, daemon=True)
    waits.start()
    assert waits.is_alive()
    give_notice(distributed.messages)
    waits.join(10)
    assert not waits.is_alive()
    stop.close()
