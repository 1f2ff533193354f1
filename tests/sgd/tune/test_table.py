from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from hpc_det.node.json_files import write_json
from hpc_det.search.method import Exit, FixedSearch, Work
from hpc_det.search.state import SearchState
from hpc_det.sgd.tune import table
from hpc_det.sgd.tune.files import DONE, ITERATION, TuneFolder
from hpc_det.sgd.tune.table import shown_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _always_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "REFRESH_S", 0.0)


@pytest.fixture
def run(tmp_path: Path) -> TuneFolder:
    """Return the run of two trials with the rates 1 and 2 and the same depth."""
    run = TuneFolder(tmp_path / "run")
    for number in (1, 2):
        trial = run.trial(number)
        trial.path.mkdir(parents=True)
        write_json(trial.trial, {"hparams": {"rate": number, "net": {"depth": 3}}})
    return run


def has(run: TuneFolder, trial: int, iteration: int, loss: float, *, done: bool = False) -> None:
    run.trial(trial).append({ITERATION: iteration, "loss": loss, DONE: done, "time": 1.0}, 1, None)


def search() -> SearchState:
    """Return a search with two slots that train the two trials."""
    state = SearchState(FixedSearch(2, None))
    state.apply({"event": "submitted", "first": 0, "count": 2, "stay": True})
    for worker in (0, 1):
        state.apply({"event": "asked", "worker": worker, "job": "driver"})
    assert state.open == {0: Work(1, None), 1: Work(2, None)}
    return state


def test_without_a_terminal_each_change_is_a_line(run: TuneFolder, capsys: pytest.CaptureFixture[str]) -> None:
    state = search()
    with shown_progress(run, "loss", verbose=True) as shown:
        shown(state)
        has(run, 1, 1, 0.5)
        shown(state)  # an iteration is no change
        has(run, 1, 2, 0.25, done=True)
        state.apply({"event": "reported", "worker": 0, "trial": 1, "until": None, "value": 0.25})
        shown(state)
        state.apply({"event": "ended", "worker": 1, "trial": 2, "how": Exit.FAILED.value})
    assert capsys.readouterr().out.splitlines() == [
        "trial 1: running, rate 1",
        "trial 2: running, rate 2",
        "trial 1: completed, rate 1, iteration 2, loss 0.25",
        "trial 2: failed, rate 2",
    ]


def test_a_terminal_shows_a_table_of_the_trials(run: TuneFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    has(run, 2, 7, 0.125)
    with shown_progress(run, "loss", verbose=True) as shown:
        shown(search())
    rows = [line.replace("│", " ").split() for line in terminal.getvalue().splitlines()]
    assert ["2", "running", "2", "7", "0.125"] in rows
    assert any("2 trials, 2 running" in line for line in terminal.getvalue().splitlines())


def test_nothing_is_shown_if_it_is_not_wanted(run: TuneFolder, capsys: pytest.CaptureFixture[str]) -> None:
    with shown_progress(run, "loss", verbose=False) as shown:
        shown(search())
    assert capsys.readouterr().out == ""
