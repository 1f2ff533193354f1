"""Experiments that rest are read once; a change after the end is noticed in spite of the index."""

from __future__ import annotations

import json
import os
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_det.store.experiment_config import write_about
from hpc_det.store.experiments import ExperimentStore
from hpc_det.store.folders import ExperimentFolder
from hpc_det.view.experiments import SETTLES_S, look, summaries
from hpc_det.view.state import ExperimentState, ExperimentView
from tests.cli.life import FakeScheduler, Life

LONG_AGO = time.time() - 3600


@pytest.fixture
def store(root: Path) -> ExperimentStore:
    return ExperimentStore(root)


@pytest.fixture
def ended(root: Path) -> Life:
    """Return experiment 1, which was COMPLETED long ago."""
    life = Life.submitted(root)
    life.begins()
    life.reports("validation", 400, {"accuracy": 0.9})
    life.finishes()
    age(life.folder)
    return life


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each read of an experiment appends its id."""
    found: list[int] = []

    def read(folder: ExperimentFolder) -> ExperimentView:
        found.append(folder.id)
        return ExperimentView(folder)

    monkeypatch.setattr("hpc_det.view.experiments.ExperimentView", read)
    return found


def age(folder: ExperimentFolder) -> None:
    """Set the times of all files of the experiment to LONG_AGO."""
    for path in (folder.path, *folder.path.rglob("*")):
        os.utime(path, (LONG_AGO, LONG_AGO))


def states(store: ExperimentStore) -> dict[int, str]:
    return {each.id: each.state.value for each in summaries(store)}


def test_an_experiment_that_has_ended_is_read_once(store: ExperimentStore, ended: Life, reads: list[int]) -> None:
    first = summaries(store)
    assert summaries(store) == first
    assert reads == [1]
    assert (first[0].state, first[0].batches) == (ExperimentState.COMPLETED, 400)
    assert first[0].best == {"metric": "accuracy", "value": 0.9, "batches": 400, "trial": 1}


def test_the_index_is_its_owners_alone(store: ExperimentStore, ended: Life) -> None:
    summaries(store)
    assert stat.S_IMODE(store.index.stat().st_mode) == 0o600


def test_an_experiment_under_way_is_read_each_time(
    store: ExperimentStore, root: Path, reads: list[int], scheduler: FakeScheduler
) -> None:
    Life.submitted(root).begins()
    assert [states(store), states(store)] == [{1: "RUNNING"}] * 2
    assert reads == [1, 1]
    assert not store.index.exists()


def continue_it(life: Life) -> None:
    life.search.continue_([])
    life.search.submitted(first=1, count=1, stay=False)
    life.search.ask(1, "4712")


def late_rank(life: Life) -> None:
    life.reports("validation", 400, {"accuracy": 0.95})


def replace_a_file(life: Life) -> None:
    write_about(life.folder, name="renamed")


@pytest.mark.parametrize("change", [continue_it, late_rank, replace_a_file])
def test_a_change_after_the_end_is_seen(
    store: ExperimentStore, ended: Life, reads: list[int], scheduler: FakeScheduler, change: Callable[[Life], None]
) -> None:
    before = summaries(store)
    change(ended)
    now = summaries(store)
    assert reads == [1, 1]
    if change is late_rank:
        assert now[0].best == {"metric": "accuracy", "value": 0.95, "batches": 400, "trial": 1}
    elif change is replace_a_file:
        assert (now[0].name, before[0].name) == ("renamed", "digits")


def test_an_experiment_that_goes_on_is_running_again(
    store: ExperimentStore, root: Path, scheduler: FakeScheduler
) -> None:
    life = Life.submitted(root, max_length={"batches": 400})
    life.begins()
    life.search.cancel("ada")
    life.search.leave(0)
    age(life.folder)
    assert states(store) == {1: "CANCELED"}
    continue_it(life)
    assert states(store) == {1: "RUNNING"}


def test_a_deleted_experiment_is_gone_and_another_may_take_its_id(
    store: ExperimentStore, root: Path, ended: Life, scheduler: FakeScheduler
) -> None:
    assert states(store) == {1: "COMPLETED"}
    ended.folder.remove()
    assert states(store) == {}
    again = Life.submitted(root, title="another")
    again.begins()
    age(again.folder)
    assert [(each.id, each.name, each.state.value) for each in summaries(store)] == [(1, "another", "RUNNING")]


def test_what_is_deleted_while_it_is_read_is_gone(
    store: ExperimentStore, ended: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(folder: ExperimentFolder) -> ExperimentView:
        folder.remove()
        return ExperimentView(folder)

    monkeypatch.setattr("hpc_det.view.experiments.ExperimentView", read)
    assert summaries(store) == []


def test_what_is_deleted_leaves_the_index_with_the_next_news(store: ExperimentStore, root: Path, ended: Life) -> None:
    summaries(store)
    later = Life.submitted(root)
    later.search.pause("ada")
    age(later.folder)
    ended.folder.remove()
    assert states(store) == {2: "PAUSED"}
    assert json.loads(store.index.read_text()).keys() == {"2"}


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "3", '{"1": 3}', '{"x": [[], {}]}', '{"1": [[], {}]}', '{"1": [[], {"state": "COMPLETED"}]}', "\0"],
)
def test_a_damaged_index_costs_time_alone(store: ExperimentStore, ended: Life, content: str) -> None:
    expected = summaries(store)
    store.index.write_text(content)
    assert summaries(store) == expected
    assert json.loads(store.index.read_text()).keys() == {"1"}


@pytest.mark.parametrize(
    "of_another",
    [lambda plain: {**plain, "colour": "red"}, lambda plain: {key: plain[key] for key in plain if key != "progress"}],
)
def test_what_another_version_has_kept_is_not_taken(
    store: ExperimentStore, ended: Life, reads: list[int], of_another: Callable[[dict[str, object]], object]
) -> None:
    """A newer version has kept one field more, and an older one lacks a field, although it has a default."""
    expected = summaries(store)
    ((trace, plain),) = json.loads(store.index.read_text()).values()
    store.index.write_text(json.dumps({"1": [trace, of_another(plain)]}))
    assert summaries(store) == expected
    assert reads == [1, 1]


def test_the_index_of_another_root_is_not_believed(
    store: ExperimentStore, ended: Life, reads: list[int], tmp_path: Path
) -> None:
    summaries(store)
    shutil.copytree(store.root, tmp_path / "copy")  # copies the files' times too
    assert states(ExperimentStore(tmp_path / "copy")) == {1: "COMPLETED"}
    assert reads == [1, 1]


def test_an_index_that_cannot_be_written_costs_time_alone(store: ExperimentStore, ended: Life) -> None:
    store.index.mkdir()
    assert [states(store), states(store)] == [{1: "COMPLETED"}] * 2


def test_what_changed_a_moment_ago_is_read_once_more(
    store: ExperimentStore, ended: Life, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change in the same tick of the file system's clock would leave no trace."""
    monkeypatch.setattr("hpc_det.view.experiments.time.time", lambda: LONG_AGO + SETTLES_S / 2)
    summaries(store)
    summaries(store)
    assert reads == [1, 1]


def test_an_experiment_with_damaged_files_is_read_each_time(
    store: ExperimentStore, ended: Life, reads: list[int]
) -> None:
    ended.trial.metrics.unlink()
    ended.trial.metrics.mkdir()
    age(ended.folder)
    for _ in range(2):
        ((found),) = summaries(store)
        assert (found.name, found.state.value) == ("(files damaged)", "COMPLETED")
    assert reads == [1, 1]


def test_what_has_not_come_to_rest_is_under_way(
    store: ExperimentStore, root: Path, ended: Life, scheduler: FakeScheduler
) -> None:
    runs = Life.submitted(root, job_id="4712")
    runs.begins()
    paused = Life.submitted(root, job_id="4713")
    paused.search.pause("ada")
    age(paused.folder)
    for _ in range(2):  # first without the index, then with it
        assert [(view.id, view.job_ids()) for view in look(store).under_way] == [(2, ["4712"])]
    assert scheduler.asked == []
    assert states(store) == {1: "COMPLETED", 2: "RUNNING", 3: "PAUSED"}
