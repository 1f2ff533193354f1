"""User-defined search methods: classes in the code of a trial that every process replays, and invalid ones."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hpc_det.errors import UsageError
from hpc_det.search.by_name import search_method
from hpc_det.search.custom import CustomSearch
from hpc_det.search.journal import SearchJournal
from hpc_det.search.method import Work
from hpc_det.search.simulate import at_random, simulate
from hpc_det.store.folders import ExperimentFolder
from tests.facts import refused, unnamed
from tests.search.experiments import experiment
from tests.search.methods import POPULATION, ROUNDS

CUSTOM = {"name": "custom", "max_trials": 8, "smaller_is_better": True, "max_length": {"batches": 8}, "settings": {}}


def custom(folder: Path, text: str, **changes: Any) -> CustomSearch:
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(text)
    found = search_method({**CUSTOM, "class": "mine:Rounds", **changes}, code=folder, seed=7)
    assert isinstance(found, CustomSearch)
    return found


def custom_experiment(folder: Path, text: str, **changes: Any) -> ExperimentFolder:
    found = experiment(folder, **{**CUSTOM, "class": "mine:Rounds", **changes})
    found.code.mkdir()
    (found.code / "mine.py").write_text(text)
    return found


def line(text: str, part: str) -> int:
    """Return the number of the line that contains this part."""
    return text[: text.index(part)].count("\n") + 1


def test_successive_halving_by_rounds_trains_half_of_the_trials_on(tmp_path: Path) -> None:
    method = custom(tmp_path, ROUNDS)
    played = simulate(method, at_random(), workers=3)
    assert sorted(length or 0 for length in played.reached.values()) == [2, 2, 2, 2, 4, 4, 8, 8]
    assert (method.finished, method.progress, method.trials_expected, method.problem) == (True, 1.0, 8, None)


def test_every_process_that_reads_the_journal_comes_to_the_same_state(tmp_path: Path) -> None:
    folder = custom_experiment(tmp_path, ROUNDS)
    search = SearchJournal(folder)
    work = search.ask(0, "job")
    while work is not None:
        work = search.report(0, work, search.sample(work.trial).hparams["lr"])
    again = SearchJournal(folder).state()
    assert again.finished
    assert again.trials == search.state().trials
    best = min(range(1, 9), key=lambda trial: float(search.sample(trial).hparams["lr"]))
    assert again.trials[best].length == 8


def test_a_method_may_choose_hyperparameters_and_whose_weights_a_trial_begins_with(tmp_path: Path) -> None:
    changes = {"class": "mine:Population", "max_trials": 4, "settings": {"size": 2}}
    folder = custom_experiment(tmp_path, POPULATION, **changes)
    search = SearchJournal(folder)
    work = search.ask(0, "job")
    while work is not None:
        search.choose(work.trial)
        work = search.report(0, work, float(work.trial))
    samples = SearchJournal(folder)
    samples.state()
    assert [samples.sample(trial).source for trial in range(1, 5)] == [None, None, 1, 1]
    parent, child = (samples.sample(trial).hparams["lr"] for trial in (1, 3))
    assert child / parent == pytest.approx(0.8) or child / parent == pytest.approx(1.25)


def test_a_generation_waits_for_the_one_before(tmp_path: Path) -> None:
    method = custom(tmp_path, POPULATION, **{"class": "mine:Population", "max_trials": 4})
    for trial in (1, 2):
        method.start(Work(trial, 8))
    assert method.next_work() is None
    method.report(1, 0.5)
    assert method.next_work() is None
    method.report(2, 0.25)
    assert method.next_work() == Work(3, 8)


def test_nothing_of_a_loaded_class_is_left_where_others_look(tmp_path: Path) -> None:
    before = list(sys.path)
    custom(tmp_path / "one", ROUNDS)
    other = custom(tmp_path / "two", ROUNDS.replace("rounds=3", "rounds=1"))
    assert sys.path == before
    assert "mine" not in sys.modules
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["mine.py"]
    assert set(simulate(other, at_random(), workers=3).reached.values()) == {8}


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("class Rounds(:", ["SyntaxError", "mine.py, line 1"]),
        ("import no_such_package", ["ModuleNotFoundError", "'no_such_package'", "mine.py, line 1"]),
        ("Rounds = 7", ["mine.py", "Rounds"]),
        (ROUNDS.replace("seed, rounds=3", "rounds=3"), ["__init__", "TypeError", "'seed'"]),
        (
            "class Rounds:\n    def __init__(self, **settings):\n        1 / 0",
            ["__init__", "ZeroDivisionError", "line 3"],
        ),
    ],
)
def test_what_is_wrong_with_a_class_is_told_with_its_line(tmp_path: Path, text: str, facts: list[str]) -> None:
    problem = custom(tmp_path, text).problem
    assert problem is not None
    assert not unnamed(problem, "searcher.class", "mine:Rounds", *facts)


def test_a_missing_file_is_told_and_hides_nothing(tmp_path: Path) -> None:
    folder = custom_experiment(tmp_path, ROUNDS)
    (folder.code / "mine.py").unlink()
    state = SearchJournal(folder).state()
    assert state.given_up is not None
    assert not unnamed(state.given_up, "searcher.class", "mine:Rounds", f"{folder.code}/mine.py")
    assert state.finished


@pytest.mark.parametrize(
    ("part", "broken"),
    [
        ("del self.trials.working[trial]", "raise KeyError(trial)"),
        ("self._end_round()\n\n    def end", "self.no_such_thing()\n\n    def end"),
    ],
)
def test_the_first_error_ends_the_search_in_every_process_alike(tmp_path: Path, part: str, broken: str) -> None:
    text = ROUNDS.replace(part, broken)
    folder = custom_experiment(tmp_path, text)
    search = SearchJournal(folder)
    works = [search.ask(worker, f"job {worker}") for worker in (0, 1)]
    assert works[0]
    assert works[1]
    assert search.report(0, works[0], 0.5) is None
    assert not search.state().finished, "the other trial is under way"
    assert search.report(1, works[1], 0.5) is None
    for state in (search.state(), SearchJournal(folder).state()):
        assert state.finished
        assert state.given_up is not None
        where = f"mine.py, line {line(text, broken.splitlines()[0])})"
        assert not unnamed(state.given_up, "searcher.class", "mine:Rounds")
        assert state.given_up.endswith(where)


@pytest.mark.parametrize("wrong", ["'next'", "Work(3, 8)", "Work(0, 8)"])
def test_work_that_cannot_be_is_refused(tmp_path: Path, wrong: str) -> None:
    method = custom(tmp_path, ROUNDS.replace("return Work(new, self.lengths[0]) if new else None", f"return {wrong}"))
    assert method.next_work() is None
    assert method.problem is not None
    assert not unnamed(method.problem, "searcher.class", "mine:Rounds", 0)


@pytest.mark.parametrize("wrong", ["None", "{'lr': object()}", "1 / 0"])
def test_hyperparameters_that_cannot_be_are_the_users_error(tmp_path: Path, wrong: str) -> None:
    text = f"{ROUNDS}\n    def sample(self, trial):\n        return {wrong}\n"
    with refused(UsageError, "searcher.class", "mine:Rounds"):
        custom(tmp_path, text).choose(1)
