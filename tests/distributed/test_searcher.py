"""A gang's connection to the search: rank 0 reads and writes, and all ranks get the same answers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from hpc_det.distributed.collectives import Distributed
from hpc_det.distributed.searcher import SearcherContext
from hpc_det.search.journal import SearchJournal
from hpc_det.search.method import Exit, Work
from hpc_det.store.folders import ExperimentFolder
from tests.distributed.ranks import OnRanks
from tests.search.experiments import experiment

HALVING = {"name": "async_halving", "max_trials": 2, "num_rungs": 2, "divisor": 2, "max_length": {"batches": 8}}


@pytest.fixture
def halving(tmp_path: Path) -> ExperimentFolder:
    return experiment(tmp_path, **HALVING)


def gang(folder: ExperimentFolder, trial: int, worker: int) -> SearcherContext:
    return SearcherContext(folder.trial(trial), worker, Distributed())


def test_a_gang_trains_until_the_search_wants_the_metric(halving: ExperimentFolder) -> None:
    SearchJournal(halving).ask(3, "4711")
    assert gang(halving, 1, worker=3).until() == 4


def test_a_gang_without_work_hears_of_no_length(halving: ExperimentFolder) -> None:
    SearchJournal(halving).ask(3, "4711")
    assert gang(halving, 1, worker=2).until() is None
    assert gang(halving, 2, worker=3).until() is None


def test_where_no_length_is_configured_the_trial_knows_its_own(tmp_path: Path) -> None:
    folder = experiment(tmp_path, name="single")
    SearchJournal(folder).ask(0, "4711")
    searcher = gang(folder, 1, worker=0)
    assert searcher.until() is None
    assert searcher.report(0.5) is None
    assert not searcher.may_come_back()
    state = SearchJournal(folder).state()
    assert (state.finished, state.trials[1].value) == (True, 0.5)


def test_a_trial_that_is_promoted_goes_on_to_the_next_length(halving: ExperimentFolder) -> None:
    search = SearchJournal(halving)
    for worker in (0, 1):
        search.ask(worker, "4711")
    search.report(1, Work(2, 4), 0.9)
    assert gang(halving, 1, worker=0).report(0.1) == 8


def test_a_trial_that_is_let_go_may_come_back_until_it_is_closed(halving: ExperimentFolder) -> None:
    search = SearchJournal(halving)
    search.ask(0, "4711")
    first = gang(halving, 1, worker=0)
    assert first.report(0.1) is None
    assert first.may_come_back()
    assert search.state().open == {0: Work(2, 4)}
    assert search.report(0, Work(2, 4), 0.9) == Work(1, 8)
    assert first.until() == 8
    assert first.report(0.05) is None
    assert not first.may_come_back()


@pytest.mark.parametrize("value", [None, math.nan])
def test_no_value_is_the_worst(halving: ExperimentFolder, value: float | None) -> None:
    SearchJournal(halving).ask(0, "4711")
    gang(halving, 1, worker=0).report(value)
    reported = SearchJournal(halving).state().trials[1].value
    assert reported is not None
    assert math.isnan(reported)


def test_a_gang_that_was_believed_lost_reports_nothing(halving: ExperimentFolder) -> None:
    search = SearchJournal(halving)
    search.ask(0, "4711_0")
    former = gang(halving, 1, worker=0)
    search.lose(0, "4711_0")
    search.ask(1, "4711_1")
    entries = len(list(halving.search.iterdir()))
    assert former.report(0.1) is None
    former.end()
    assert former.may_come_back()
    assert len(list(halving.search.iterdir())) == entries
    assert search.state().trials[1].value is None


def test_a_trial_that_wants_no_more_has_completed(halving: ExperimentFolder) -> None:
    search = SearchJournal(halving)
    search.ask(0, "4711")
    gang(halving, 1, worker=0).end()
    assert search.state().trials[1].ended is Exit.COMPLETED
    assert search.state().open == {0: Work(2, 4)}


def lives(distributed: Distributed, folder: ExperimentFolder) -> list[Any]:
    """Return the answers of the search on this rank; only rank 0 knows the metric."""
    searcher = SearcherContext(folder.trial(), 0, distributed)
    value = 0.1 if distributed.is_chief else None
    return [searcher.until(), searcher.report(value), searcher.report(value), searcher.may_come_back()]


def test_all_ranks_get_the_same_answers(on_ranks: OnRanks, halving: ExperimentFolder) -> None:
    search = SearchJournal(halving)
    for worker in (0, 1):
        search.ask(worker, "4711")
    search.report(1, Work(2, 4), 0.9)
    assert on_ranks(2, lives, halving) == [[4, 8, None, False]] * 2
    trial = search.state().trials[1]
    assert (trial.value, trial.length) == (0.1, 8)
