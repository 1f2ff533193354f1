"""The loop under a search: a trial continues, pauses and resumes elsewhere without any effect on the result."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_det.distributed.collectives import Distributed
from hpc_det.node.json_files import write_json
from hpc_det.pytorch import PyTorchTrial
from hpc_det.search.journal import SearchJournal
from hpc_det.search.method import Exit, Work
from hpc_det.store.folders import ExperimentFolder
from tests.distributed.ranks import OnRanks
from tests.pytorch.trials import CONFIG, Life, StopAt, Tiny, assert_same

WORST = math.nan


class Satisfied(Tiny):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        if batch_idx == 2:
            self.context.set_stop_requested(True)
        return super().train_batch(batch, epoch_idx, batch_idx)


class Hopeless(Tiny):
    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        return {"loss": torch.tensor(math.nan)}


class Searched:
    """Trial 1 of a search that promotes one of two trials from 6 to 12 batches."""

    def __init__(
        self, folder: Path, trial_class: type[PyTorchTrial] = Tiny, max_length: dict[str, int] | None = None
    ) -> None:
        searcher = {
            **CONFIG["searcher"],
            "name": "async_halving",
            "max_trials": 2,
            "num_rungs": 2,
            "divisor": 2,
            "stop_once": False,
            "max_length": max_length or {"batches": 12},
        }
        self.experiment = ExperimentFolder(folder)
        self.experiment.search.mkdir(parents=True)
        write_json(self.experiment.effective, {**CONFIG, "searcher": searcher})
        self.life = Life.begin(self.experiment.trial().path, trial_class, searcher=searcher)
        self.search = SearchJournal(self.experiment)
        self.search.ask(0, "4711")

    def the_other_one_fails(self, worker: int) -> None:
        work = self.search.ask(worker, "4711")
        assert work is not None
        assert work.trial == 2
        self.search.report(worker, work, WORST)


@pytest.fixture
def undisturbed(tmp_path: Path) -> Searched:
    """Run trial 1, which is promoted as soon as it reports, and continues in the same process."""
    searched = Searched(tmp_path / "undisturbed")
    searched.the_other_one_fails(worker=1)
    assert searched.life.attempt(worker=0).end == "finished"
    assert searched.life.steps("validation")[-1] == 12
    return searched


def test_a_trial_that_is_promoted_goes_on_in_the_same_process(undisturbed: Searched) -> None:
    assert undisturbed.life.attempts == 1
    assert undisturbed.life.steps("validation") == [5, 6, 10, 12]
    state = undisturbed.search.state()
    assert (state.finished, state.trials[1].length) == (True, 12)
    assert state.trials[1].value == undisturbed.life.series[-1][2]["loss"]


def test_a_trial_that_is_let_go_saves_and_comes_back_in_another_worker_bit_for_bit(
    undisturbed: Searched, tmp_path: Path
) -> None:
    searched = Searched(tmp_path / "paused")
    assert searched.life.attempt(worker=0).end == "waiting"
    assert searched.life.steps("validation") == [5, 6]
    assert searched.life.checkpoints[-1] == 6
    assert searched.search.state().open == {0: Work(2, 6)}
    searched.search.lose(0, "4711")
    searched.the_other_one_fails(worker=1)
    assert searched.search.state().open == {1: Work(1, 12)}
    assert searched.life.attempt(worker=1).end == "finished"
    assert_same(searched.life, undisturbed.life)
    assert searched.search.state().trials[1] == undisturbed.search.state().trials[1]


@pytest.mark.integration
@pytest.mark.parametrize("paused", [False, True])
def test_a_stop_anywhere_changes_nothing(undisturbed: Searched, tmp_path: Path, paused: bool) -> None:
    for tick in range(1, 17):
        searched = Searched(tmp_path / f"{tick}")
        if not paused:
            searched.the_other_one_fails(worker=1)
        ended = searched.life.attempt(StopAt(tick, look=1 + tick % 3), worker=0).end
        if ended == "stopped":
            ended = searched.life.attempt(worker=0).end
        if paused:
            assert ended == "waiting"
            assert searched.search.report(0, Work(2, 6), WORST) == Work(1, 12)
            ended = searched.life.attempt(StopAt(tick), worker=0).end
            if ended == "stopped":
                ended = searched.life.attempt(worker=0).end
        assert ended == "finished"
        assert_same(searched.life, undisturbed.life)


def test_a_trial_that_was_killed_after_its_report_goes_on_to_the_next_length(
    undisturbed: Searched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The actions due at the batch of the report are not repeated, so the checkpoint precedes the report."""
    searched = Searched(tmp_path / "killed")
    searched.the_other_one_fails(worker=1)
    report = SearchJournal.report

    def and_die(*arguments: Any, **options: Any) -> None:
        report(*arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(SearchJournal, "report", and_die)
        with pytest.raises(KeyboardInterrupt):
            searched.life.attempt(worker=0)
    assert searched.search.state().open == {0: Work(1, 12)}
    assert searched.life.attempt(worker=0).end == "finished"
    assert_same(searched.life, undisturbed.life)


def test_a_gang_that_failed_after_its_report_is_not_trained_on_unasked(tmp_path: Path) -> None:
    searched = Searched(tmp_path)
    assert searched.life.attempt(worker=0).end == "waiting"
    series = searched.life.series
    assert searched.life.attempt(worker=0).end == "waiting"
    assert searched.life.series == series
    assert searched.search.report(0, Work(2, 6), 1e-9) == Work(2, 12)
    assert searched.search.report(0, Work(2, 12), 1e-9) is None
    assert searched.life.attempt(worker=0).end == "finished", "nothing will ever be wanted of it"
    assert searched.life.series == series


def test_a_gang_that_was_believed_lost_before_it_began_trains_nothing(tmp_path: Path) -> None:
    searched = Searched(tmp_path)
    searched.search.lose(0, "4711")
    assert searched.life.attempt(worker=0).end == "waiting"
    assert searched.life.series == []


@pytest.mark.parametrize("unit", [{"batches": 12}, {"epochs": 2}, {"records": 48}])
def test_the_search_counts_in_the_unit_of_the_experiment(
    undisturbed: Searched, tmp_path: Path, unit: dict[str, int]
) -> None:
    """An epoch has 6 batches; records become batches of 4."""
    searched = Searched(tmp_path / "in a unit", max_length=unit)
    searched.the_other_one_fails(worker=1)
    assert searched.life.attempt(worker=0).end == "finished"
    assert_same(searched.life, undisturbed.life)
    assert searched.search.state().trials[1].length == next(iter(unit.values()))


def test_a_trial_that_asks_to_stop_has_completed_and_the_search_goes_on(tmp_path: Path) -> None:
    searched = Searched(tmp_path, Satisfied)
    assert searched.life.attempt(worker=0).end == "finished"
    assert searched.life.steps("validation")[-1] == 4
    state = searched.search.state()
    assert state.trials[1].ended is Exit.COMPLETED
    assert state.trials[1].value == searched.life.series[-1][2]["loss"]
    assert state.open == {0: Work(2, 6)}


def test_a_metric_that_is_no_number_is_the_worst(tmp_path: Path) -> None:
    searched = Searched(tmp_path, Hopeless)
    assert searched.life.attempt(worker=0).end == "waiting"
    assert searched.search.report(0, Work(2, 6), 1e9) == Work(2, 12)
    value = searched.search.state().trials[1].value
    assert value is not None
    assert math.isnan(value)


def on_a_rank(distributed: Distributed, life: Life, worker: int) -> str:
    return life.attempt(distributed=distributed, worker=worker).end


def test_all_ranks_pause_and_finish_together(on_ranks: OnRanks, tmp_path: Path) -> None:
    searched = Searched(tmp_path)
    assert on_ranks(2, on_a_rank, searched.life, 0) == ["waiting"] * 2
    assert searched.search.report(0, Work(2, 6), WORST) == Work(1, 12)
    assert on_ranks(2, on_a_rank, searched.life, 0) == ["finished"] * 2
    assert searched.search.state().finished
    assert searched.life.checkpoints[-1] == 12
