"""The choice of the best trial of a search."""

from __future__ import annotations

from pathlib import Path

from hpc_det.search.journal import SearchJournal
from hpc_det.search.state import BestTrial, best_trial
from tests.cli.life import Life, halving


def test_the_best_trial_is_by_all_reports(tmp_path: Path) -> None:
    life = Life.submitted(tmp_path, **halving(4))
    life.begins()
    search = SearchJournal(life.folder)
    assert best_trial(search.new(), search.searcher) is None
    for value in (0.5, 0.9, float("nan"), 0.7, 0.6):
        life.reaches(value)
    search = SearchJournal(life.folder)
    assert best_trial(search.new(), search.searcher) == BestTrial(trial=2, metric="accuracy", value=0.9, length=100)
    assert search.state().finished
