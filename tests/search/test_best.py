"""The choice of the best trial of a search."""

from __future__ import annotations

from pathlib import Path

from hpc_det.search.journal import SearchJournal
from hpc_det.search.method import Exit
from hpc_det.search.state import BestTrial, Length, best_trial
from tests.cli.life import Life, halving


def test_the_best_trial_is_by_all_reports(tmp_path: Path) -> None:
    life = Life.submitted(tmp_path, **halving(4))
    life.begins()
    search = SearchJournal(life.folder)
    assert best_trial(search.new(), search.searcher) is None
    for value in (0.5, 0.9, float("nan"), 0.7, 0.6):
        life.reaches(value)
    search = SearchJournal(life.folder)
    assert best_trial(search.new(), search.searcher) == BestTrial(
        trial=2, metric="accuracy", value=0.9, length=Length(100, "batches")
    )
    assert search.state().finished


def test_the_last_value_of_a_trial_that_ended_its_training_itself_counts(tmp_path: Path) -> None:
    life = Life.submitted(tmp_path, **halving(4))
    life.begins()
    search = SearchJournal(life.folder)
    search.end(0, 1, Exit.COMPLETED, value=0.4, batches=12)
    search.end(0, 2, Exit.COMPLETED, value=float("nan"), batches=12)
    search.end(0, 3, Exit.FAILED)
    found = best_trial(SearchJournal(life.folder).new(), search.searcher)
    assert found == BestTrial(trial=1, metric="accuracy", value=0.4, length=Length(12, "batches"))
    trials = search.state().trials
    assert [(trials[number].value, trials[number].length) for number in (1, 3)] == [(0.4, None), (None, None)]
