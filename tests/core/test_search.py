"""A plain loop under a search: it trains to the requested lengths, waits, is promoted and ends."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from hpc_det.core.core import Core
from hpc_det.errors import UsageError
from hpc_det.node.json_files import write_json
from hpc_det.search.journal import SearchJournal
from hpc_det.search.method import Exit, Work
from hpc_det.search.state import best_trial
from hpc_det.store.folders import ExperimentFolder
from hpc_det.store.metrics import read_reports
from tests.core.loops import CONFIG, PASS, Loop, PlainLoop, assert_same
from tests.facts import refused
from tests.pytorch.trials import StopAt

LENGTHS = {"batches": 12}


class InOperations(PlainLoop):
    """Trains as long as the search requests."""

    def run(self) -> None:
        for operation in self.core.search:
            for batch in self.core.batches(self.loader, until=operation):
                self.core.report(self.core.step, {"loss": self.train(batch)})
            self.core.report(self.core.step, self.validate(), group="validation")


class Searched:
    """Trial 1 of a search that promotes one of two trials from 6 to 12 batches, or from 1 to 2 passes."""

    def __init__(
        self, folder: Path, program: Any, max_length: dict[str, int], hparams: Any = None, name: str = "async_halving"
    ) -> None:
        searcher = {
            **CONFIG["searcher"],
            "name": name,
            "max_trials": 2,
            "num_rungs": 2,
            "divisor": 2,
            "stop_once": False,
            "max_length": max_length,
        }
        self.experiment = ExperimentFolder(folder)
        self.experiment.search.mkdir(parents=True)
        config = {**CONFIG, "searcher": searcher, "hyperparameters": {}, "reproducibility": {"experiment_seed": 5}}
        self.config = config
        write_json(self.experiment.effective, config)
        self.loop = Loop.begin(self.experiment.trial().path, program, hparams, worker=0, searcher=searcher)
        self.search = SearchJournal(self.experiment)
        self.search.ask(0, "4711")

    def the_other_one_fails(self) -> None:
        """Worker 1 trains trial 2, and then gets what trial 1 still has to do."""
        self.search.lose(0, "4711")
        work = self.search.ask(1, "4711")
        assert work is not None
        assert work.trial == 2
        self.search.report(1, work, math.nan)
        self.loop.worker = 1


def alone(path: Path, steps: int = 12) -> Loop:
    """Return a run of the same loop to `steps` batches without a search."""
    loop = Loop.begin(path, InOperations, searcher={"max_length": {"batches": steps}})
    loop.attempt()
    return loop


@pytest.mark.parametrize(
    ("max_length", "hparams"),
    [
        (LENGTHS, {}),
        ({"epochs": 2}, {}),
        ({"records": 96}, {"global_batch_size": 8}),
    ],
)
def test_a_trial_waits_at_a_rung_and_is_promoted_from_where_it_was(
    tmp_path: Path, max_length: dict[str, int], hparams: dict[str, int]
) -> None:
    searched = Searched(tmp_path / "searched", InOperations, max_length, hparams)
    core = searched.loop.attempt()
    assert (core.step, core.should_stop().reason) == (6, "search")
    assert searched.loop.outcome == {"attempt": 1, "kind": "waiting", "steps": 6, "saved": True}
    searched.the_other_one_fails()
    assert searched.loop.attempt().step == 12
    assert searched.loop.outcome["kind"] == "finished"
    assert [steps for kind, steps, _ in searched.loop.series if kind == "validation"] == [6, 12]


@pytest.mark.parametrize("max_length", [LENGTHS, {"epochs": 2}])
def test_the_total_of_a_trial_follows_its_rungs_within_one_attempt(tmp_path: Path, max_length: dict[str, int]) -> None:
    searched = Searched(tmp_path, InOperations, max_length)
    work = searched.search.ask(1, "4711")
    assert work is not None
    searched.search.report(1, work, math.nan)
    assert searched.loop.attempt().step == 12
    last = read_reports(searched.loop.folder.metrics)[-1]
    assert (searched.loop.attempts, last["steps"], last["total"]) == (1, 12, 12)


def test_a_promoted_trial_is_the_same_as_one_that_was_not_interrupted(tmp_path: Path) -> None:
    whole = Searched(tmp_path / "whole", InOperations, LENGTHS)
    work = whole.search.ask(1, "4711")
    assert work is not None
    whole.search.report(1, work, math.nan)
    whole.loop.attempt()
    assert (whole.loop.attempts, whole.loop.outcome["kind"]) == (1, "finished")
    searched = Searched(tmp_path / "searched", InOperations, LENGTHS)
    searched.loop.attempt()
    searched.the_other_one_fails()
    searched.loop.attempt(StopAt(3))
    assert searched.loop.outcome["kind"] == "stopped"
    searched.loop.attempt()
    assert_same(searched.loop, whole.loop)


class InPasses(PlainLoop):
    """Knows nothing of the search, and validates after each pass."""

    def run(self) -> None:
        for _ in self.core.epochs(2):
            for batch in self.core.batches(self.loader):
                self.core.report(self.core.step, {"loss": self.train(batch)})
            self.core.report(self.core.step, self.validate(), group="validation")


def test_a_loop_that_knows_nothing_of_the_search_is_ended_and_promoted_by_its_validations(tmp_path: Path) -> None:
    searched = Searched(tmp_path, InPasses, LENGTHS)
    assert searched.loop.attempt().step == PASS
    assert searched.loop.outcome["kind"] == "waiting"
    searched.loop.attempt()  # without work, as after a kill: it trains nothing
    assert searched.loop.outcome == {"attempt": 2, "kind": "waiting", "steps": 6, "saved": True}
    searched.the_other_one_fails()
    assert searched.loop.attempt().step == 12
    state = SearchJournal(searched.experiment).state()
    assert state.method.is_closed(1)
    assert state.trials[1].ended in (None, Exit.COMPLETED)


@pytest.mark.parametrize("name", ["async_halving", "single"])
def test_a_loop_that_ends_before_its_length_has_completed_its_trial(tmp_path: Path, name: str) -> None:
    class Short(InPasses):
        def run(self) -> None:
            for _ in zip(range(2), self.core.batches(self.loader), strict=False):
                pass
            self.core.report(self.core.step, self.validate(), group="validation")

    searched = Searched(tmp_path, Short, LENGTHS, name=name)
    searched.loop.attempt()
    assert searched.loop.outcome["kind"] == "finished"
    search = SearchJournal(searched.experiment)
    best = best_trial(search.new(), search.searcher)
    assert best
    assert best.length == (2, "batches")
    assert search.state().trials[1].ended is Exit.COMPLETED


def test_a_trial_of_a_search_that_compares_nothing_continues_with_a_greater_length(tmp_path: Path) -> None:
    searched = Searched(tmp_path, InOperations, LENGTHS, name="single")
    assert searched.loop.attempt().step == 12
    assert SearchJournal(searched.experiment).state().finished
    longer = {**searched.config, "searcher": {**searched.config["searcher"], "max_length": {"batches": 18}}}
    write_json(searched.experiment.effective, longer)
    state = SearchJournal(searched.experiment).state()
    assert (state.finished, state.open) == (False, {0: Work(1, 18)})


def test_a_validation_without_the_metric_that_a_search_compares_is_refused(tmp_path: Path) -> None:
    class Other(InOperations):
        def validate(self) -> dict[str, float]:
            return {"eror": 1.0}

    with refused(UsageError, "searcher.metric", "error", "eror"):
        Searched(tmp_path / "searched", Other, LENGTHS).loop.attempt()
    Loop.begin(tmp_path / "alone", Other).attempt()  # nothing is compared


def test_an_operation_that_is_not_completed_is_refused(tmp_path: Path) -> None:
    class Lazy(PlainLoop):
        reports = False

        def run(self) -> None:
            for operation in self.core.search:
                if self.reports:
                    list(self.core.batches(self.loader, until=operation))

    with refused(UsageError, "12 batches", "batch 0"):
        Loop.begin(tmp_path / "early", Lazy, searcher={"max_length": LENGTHS}).attempt()
    Lazy.reports = True
    with refused(UsageError, "12 batches", "error", "validation"):
        Loop.begin(tmp_path / "unreported", Lazy, searcher={"max_length": LENGTHS}).attempt()


def test_a_loop_over_operations_needs_a_length(tmp_path: Path) -> None:
    loop = Loop.begin(tmp_path, InOperations)
    searcher = {**CONFIG["searcher"]}
    del searcher["max_length"]
    loop.config = {**CONFIG, "searcher": searcher}
    with refused(UsageError, "searcher.max_length"):
        loop.attempt()


def test_the_core_of_a_run_without_a_search_has_one_operation(tmp_path: Path) -> None:
    def lengths(core: Core) -> list[tuple[int, str]]:
        found = []
        for operation in core.search:
            found.append((operation.length, operation.unit))
            list(core.batches([1], until=operation))
            core.report(core.step, {"error": 1}, group="validation")
        return found

    class Program:
        def __init__(self, core: Core) -> None:
            self._core = core

        def run(self) -> None:
            assert lengths(self._core) == [(3, "epochs")]
            assert self._core.step == 3

    Loop.begin(tmp_path, Program).attempt()


def test_same(tmp_path: Path) -> None:
    """Two undisturbed runs are the same, so that the comparisons above mean something."""
    assert_same(alone(tmp_path / "a"), alone(tmp_path / "b"))
    with pytest.raises(AssertionError):
        assert_same(alone(tmp_path / "c", 11), alone(tmp_path / "d"))


@pytest.mark.parametrize("commits", [True, False])
def test_a_loop_with_its_own_files_reports_to_the_search_after_its_commit(tmp_path: Path, commits: bool) -> None:
    """Without a commit, it reports when it asks next."""
    found: list[Any] = []

    class OwnFiles(PlainLoop):
        def __init__(self, core: Core) -> None:
            self.core = core

        def run(self) -> None:
            core = self.core
            core.report(6, {"error": 1.0}, group="validation")
            found.append(dict(searched.search.state().open))
            assert core.is_checkpoint_due(6)
            if commits:
                with core.checkpoint(6):
                    pass
                found.append(dict(searched.search.state().open))
            found.append(core.should_stop().reason)

    searched = Searched(tmp_path, OwnFiles, LENGTHS)
    searched.loop.attempt()
    assert found == [{0: Work(1, 6)}, *([{0: Work(2, 6)}] if commits else []), "search"]
    assert searched.search.state().open == {0: Work(2, 6)}
    assert searched.loop.outcome["kind"] == "waiting"
