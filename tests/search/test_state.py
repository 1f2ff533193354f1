"""The state of a search that its workers share: every process derives the same state from the journal."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_det.errors import HpcDetError
from hpc_det.node.json_files import write_json
from hpc_det.search.journal import SearchJournal
from hpc_det.search.method import Exit, Work
from hpc_det.search.state import SearchState
from hpc_det.store.folders import ExperimentFolder
from hpc_det.store.shared_log import SharedLog
from tests.facts import refused, unnamed
from tests.search.experiments import experiment

RANDOM = {"name": "random", "max_trials": 3, "max_length": {"batches": 100}}
ASHA = {"name": "async_halving", "max_trials": 8, "num_rungs": 3, "divisor": 2, "max_length": {"batches": 8}}


@pytest.fixture
def random_search(tmp_path: Path) -> ExperimentFolder:
    return experiment(tmp_path, **RANDOM)


@pytest.fixture
def halving(tmp_path: Path) -> ExperimentFolder:
    return experiment(tmp_path, **ASHA)


# --- workers come and go


def test_workers_that_ask_get_one_trial_each_until_none_is_left(random_search: ExperimentFolder) -> None:
    workers = [SearchJournal(random_search) for _ in range(4)]
    given_out = [search.ask(number, f"job {number}") for number, search in enumerate(workers)]
    assert given_out == [Work(1, 100), Work(2, 100), Work(3, 100), None]
    state = workers[0].state()
    assert state.present == {number: f"job {number}" for number in range(4)}
    assert {number: trial.worker for number, trial in state.trials.items()} == {1: 0, 2: 1, 3: 2}
    assert not state.finished


def test_a_worker_that_asks_again_gets_what_it_had(random_search: ExperimentFolder) -> None:
    search = SearchJournal(random_search)
    assert search.ask(7, "4711") == search.ask(7, "4712") == Work(1, 100)
    assert search.state().present == {7: "4712"}


def test_what_was_reported_is_known_and_the_last_report_finishes_the_search(random_search: ExperimentFolder) -> None:
    search = SearchJournal(random_search)
    work, values = search.ask(0, "4711"), []
    while work is not None:
        values.append(work.trial / 10)
        work = search.report(0, work, values[-1])
    state = SearchJournal(random_search).state()
    assert state.finished
    assert [(trial.length, trial.value, trial.worker) for trial in state.trials.values()] == [
        (100, value, None) for value in (0.1, 0.2, 0.3)
    ]
    assert state.present == {0: "4711"}, "it may still write"
    search.leave(0)
    assert search.state().present == {}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_the_worst(halving: ExperimentFolder, value: float) -> None:
    search = SearchJournal(halving)
    works = [search.ask(worker, "4711") for worker in range(2)]
    assert works == [Work(1, 2), Work(2, 2)]
    assert search.report(0, Work(1, 2), value) == Work(3, 2), "it is not promoted"
    assert search.report(1, Work(2, 2), 1e9) == Work(2, 4), "the other one is better"
    replayed = SearchJournal(halving).state().trials[1].value
    assert replayed is not None
    assert math.isnan(replayed)


@pytest.mark.parametrize("how", [Exit.COMPLETED, Exit.FAILED])
def test_a_trial_that_ends_by_itself_is_closed_and_its_worker_goes_on(
    random_search: ExperimentFolder, how: Exit
) -> None:
    search = SearchJournal(random_search)
    search.ask(0, "4711")
    assert search.end(0, 1, how) == Work(2, 100)
    assert search.state().trials[1].ended is how
    assert search.state().method.is_closed(1)


def test_a_worker_whose_trial_is_cancelled_gets_no_other_one(random_search: ExperimentFolder) -> None:
    search = SearchJournal(random_search)
    search.ask(0, "4711_0")
    assert search.end(0, 1, Exit.CANCELLED) is None
    assert search.ask(1, "4711_1") == Work(2, 100), "it is there for others"
    assert search.state().method.is_closed(1)


def test_a_trial_with_invalid_hyperparameters_is_replaced_by_another_one(random_search: ExperimentFolder) -> None:
    search = SearchJournal(random_search)
    search.ask(0, "4711")
    work = search.end(0, 1, Exit.INVALID_HP)
    trained = []
    while work is not None:
        trained.append(work.trial)
        work = search.report(0, work, 0.5)
    assert trained == [2, 3, 4]
    assert search.state().finished


# --- who is lost


def test_the_work_of_a_lost_worker_is_done_by_the_next_one(random_search: ExperimentFolder) -> None:
    search = SearchJournal(random_search)
    search.ask(0, "4711_0")
    search.ask(1, "4711_1")
    search.lose(0, "4711_0")
    assert search.state().present == {1: "4711_1"}
    assert search.state().trials[1].worker is None
    assert search.ask(2, "4711_2") == Work(1, 100)


def test_a_worker_that_has_begun_anew_is_not_lost_with_its_former_job(random_search: ExperimentFolder) -> None:
    search = SearchJournal(random_search)
    search.ask(0, "4711")
    search.ask(0, "4712")
    search.lose(0, "4711")
    assert search.state().open == {0: Work(1, 100)}
    assert search.state().present == {0: "4712"}


def test_reports_of_a_worker_that_was_believed_lost_change_nothing(random_search: ExperimentFolder) -> None:
    stale, search = SearchJournal(random_search), SearchJournal(random_search)
    work = stale.ask(0, "4711_0")
    assert work is not None
    search.lose(0, "4711_0")
    assert search.ask(1, "4711_1") == work
    assert stale.report(0, work, 0.1) is None
    assert stale.end(0, work.trial, Exit.FAILED) is None
    trial = search.state().trials[1]
    assert (trial.worker, trial.value, trial.ended) == (1, None, None)
    assert search.report(1, work, 0.2) == Work(2, 100)
    assert search.state().trials[1].value == 0.2


def test_a_report_that_comes_twice_counts_once(halving: ExperimentFolder) -> None:
    search = SearchJournal(halving)
    work = search.ask(0, "4711")
    assert work is not None
    after = search.report(0, work, 0.5)
    assert search.report(0, work, 0.1) == after
    assert search.state().trials[1].value == 0.5


# --- the queue


def test_a_worker_leaves_other_work_to_those_that_wait_in_the_queue(random_search: ExperimentFolder) -> None:
    search = SearchJournal(random_search)
    search.submitted(first=0, count=3, stay=False)
    work = search.ask(0, "4711_0")
    assert work is not None
    assert search.report(0, work, 0.5) is None
    assert not search.state().finished
    assert [search.ask(worker, f"4711_{worker}") for worker in (1, 2)] == [Work(2, 100), Work(3, 100)]


def test_where_nobody_waits_any_more_the_worker_goes_on_itself(random_search: ExperimentFolder) -> None:
    search = SearchJournal(random_search)
    search.submitted(first=0, count=2, stay=False)
    first, second = search.ask(0, "4711_0"), search.ask(1, "4711_1")
    assert first is not None
    assert second is not None
    assert search.report(1, second, 0.5) == Work(3, 100)
    assert search.report(0, first, 0.5) is None, "max_trials is 3"


def test_workers_that_share_an_allocation_stay_in_it(random_search: ExperimentFolder) -> None:
    search = SearchJournal(random_search)
    search.submitted(first=0, count=2, stay=True)
    work = search.ask(0, "4711")
    assert work is not None
    assert search.report(0, work, 0.5) == Work(2, 100)


def test_a_promoted_trial_stays_with_its_worker_though_others_wait(halving: ExperimentFolder) -> None:
    search = SearchJournal(halving)
    search.submitted(first=0, count=8, stay=False)
    for worker in range(2):
        search.ask(worker, f"4711_{worker}")
    assert search.report(0, Work(1, 2), 0.9) is None
    assert search.report(1, Work(2, 2), 0.1) == Work(2, 4)


# --- the end by hand


def test_after_a_cancellation_nobody_gets_work(random_search: ExperimentFolder) -> None:
    search = SearchJournal(random_search)
    work = search.ask(0, "4711")
    assert work is not None
    SearchJournal(random_search).cancel("ada")
    SearchJournal(random_search).cancel("bob")
    assert search.state().cancelled == "ada"
    assert search.state().finished
    assert search.report(0, work, 0.5) is None
    assert search.ask(1, "4712") is None


def test_what_has_finished_cannot_be_cancelled(tmp_path: Path) -> None:
    search = SearchJournal(experiment(tmp_path, name="single"))
    work = search.ask(0, "4711")
    assert work is not None
    search.report(0, work, 0.5)
    search.cancel("ada")
    assert search.state().cancelled is None


def test_hyperparameters_that_others_chose_stand_once_they_are_written(random_search: ExperimentFolder) -> None:
    state = SearchJournal(random_search).state()
    for sample in ({"lr": 1}, {"lr": 2}):
        state.apply({"event": "sampled", "trial": 1, "sample": sample})
    assert state.samples == {1: {"lr": 1}}


# --- any order of events

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "report", "fail", "invalid", "lose", "leave", "stale"]),
        st.integers(0, 4),
        st.floats(0, 1),
    ),
    max_size=60,
)
SEARCHERS = st.sampled_from([RANDOM, ASHA, {**ASHA, "name": "adaptive_asha", "mode": "standard", "max_rungs": 3}])


def shown(state: SearchState) -> Any:
    """Return everything in which two replays must agree."""
    return (
        state.open,
        state.trials,
        state.present,
        state.cancelled,
        state.finished,
        state.last_trial,
        state.method.next_work(),
        state.method.progress,
    )


def happens(search: SearchJournal, event: str, worker: int, value: float) -> None:
    """Write this event for a living worker, if it is possible in the current state."""
    state = search.state()
    work = state.open.get(worker)
    if event == "ask":
        search.ask(worker, f"job {worker}")
    elif event == "stale":
        search.report(worker, Work(1 + worker, 2), value)
    elif event == "lose":
        search.lose(worker, state.present.get(worker, "none"))
    elif event == "leave" and work is None and worker in state.present:
        search.leave(worker)
    elif work and event == "report":
        search.report(worker, work, value)
    elif work and event in ("fail", "invalid"):
        search.end(worker, work.trial, Exit.FAILED if event == "fail" else Exit.INVALID_HP)


@pytest.mark.integration
@settings(max_examples=40)
@given(searcher=SEARCHERS, events=EVENTS, waiting=st.integers(0, 5), stay=st.booleans())
def test_any_order_of_events_ends_well_and_every_replay_agrees(
    tmp_path_factory: pytest.TempPathFactory,
    searcher: dict[str, Any],
    events: list[tuple[str, int, float]],
    waiting: int,
    stay: bool,
) -> None:
    folder = experiment(tmp_path_factory.mktemp("any"), **searcher)
    search, follower = SearchJournal(folder), SearchJournal(folder)
    search.submitted(first=0, count=waiting, stay=stay)
    for number, (event, worker, value) in enumerate(events):
        happens(search, event, worker, value)
        state = search.state()
        assert len({work.trial for work in state.open.values()}) == len(state.open), "one work has one worker"
        if number % 7 == 0:
            assert shown(follower.state()) == shown(state)
        if number % 20 == 0:
            assert shown(SearchJournal(folder).state()) == shown(state)
    finish(search)
    assert search.state().finished
    assert search.state().method.progress == 1
    assert shown(SearchJournal(folder).state()) == shown(follower.state()) == shown(search.state())
    done = [trial for trial in search.state().trials.values() if trial.ended is not Exit.INVALID_HP]
    assert len(done) == searcher["max_trials"]


def finish(search: SearchJournal) -> None:
    """Report all open work, then let all five workers ask for work until the search has finished."""
    for _ in range(200):
        if search.state().finished:
            return
        for worker in range(5):
            work = search.state().open.get(worker) or search.ask(worker, "at last")
            if work:
                search.report(worker, work, 1 / work.trial)


def test_every_prefix_of_a_journal_gives_the_state_that_was_decided_on(halving: ExperimentFolder) -> None:
    search, states = SearchJournal(halving), []
    for worker in range(3):
        search.ask(worker, f"job {worker}")
        states.append(repr(shown(search.state())))
    while not search.state().finished:
        for worker, work in sorted(search.state().open.items()):
            search.report(worker, work, 1 / work.trial)
            states.append(repr(shown(search.state())))
    paths = sorted(halving.search.glob("*.json"))
    assert len(paths) == len(states)
    replay = SearchJournal(experiment(halving.path / "replay", **ASHA)).state()
    for path, decided in zip(paths, states, strict=True):
        replay.apply(json.loads(path.read_text()))
        assert repr(shown(replay)) == decided


def test_the_trials_of_a_sweep_have_the_sections_of_their_points(tmp_path: Path) -> None:
    folder = experiment(tmp_path, name="single", max_length={"batches": 100})
    points = [{"hyperparameters": {"lr": {"type": "const", "val": val}}} for val in (0.1, 0.2)]
    write_json(folder.points, points)
    search = SearchJournal(folder)
    assert [search.ask(worker, "4711") for worker in range(3)] == [Work(1, 100), Work(2, 100), None]
    assert [search.sample(trial).hparams for trial in (1, 2)] == [{"lr": 0.1}, {"lr": 0.2}]
    assert search.config(2)["hyperparameters"] == points[1]["hyperparameters"]
    assert search.config(2)["searcher"] == search.config(1)["searcher"]


# --- where nothing works


def invalid(search: SearchJournal, worker: int = 0) -> None:
    work = search.state().open[worker]
    search.end(worker, work.trial, Exit.INVALID_HP)


@pytest.mark.parametrize(("trials", "most"), [(3, 10), (12, 12)])
@pytest.mark.parametrize("searcher", [RANDOM, ASHA])
def test_replacements_of_invalid_trials_come_to_an_end(
    tmp_path: Path, searcher: dict[str, Any], trials: int, most: int
) -> None:
    search = SearchJournal(experiment(tmp_path, **{**searcher, "max_trials": trials}))
    search.ask(0, "4711")
    for _ in range(most - 1):
        invalid(search)
    assert search.state().given_up is None
    invalid(search)
    state = search.state()
    assert (state.finished, len(state.trials)) == (True, most)
    assert state.given_up is not None
    assert not unnamed(state.given_up, most)


def test_trials_under_way_go_on_though_no_others_come(tmp_path: Path) -> None:
    search = SearchJournal(experiment(tmp_path, **RANDOM))
    good = search.ask(1, "4712")
    assert good
    search.ask(0, "4711")
    for _ in range(10):
        invalid(search)
    assert not search.state().finished
    search.lose(1, "4712")
    assert search.ask(2, "4713") == good
    assert search.report(2, good, 0.5) is None
    assert search.state().finished


def test_a_search_of_other_rules_is_not_replayed(random_search: ExperimentFolder) -> None:
    """For example after an update during the search: the new rules would decide differently on the same facts."""
    submitted = {"event": "submitted", "first": 0, "count": 3, "stay": False, "rules": 0}
    SharedLog(random_search.search).append(submitted)
    with refused(HpcDetError, "version 0 of the search rules", "version 1", "hpc-det experiment fork"):
        SearchJournal(random_search).state()
