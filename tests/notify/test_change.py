"""Notifications: which hook gets which change of an experiment, and each change only once."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_det.node.files import SHARED_FOLDER
from hpc_det.node.json_files import read_json, write_json
from hpc_det.notify import delivery
from hpc_det.notify.change import hooks_told, tell_rest, tell_running
from hpc_det.requeue import Action, Cause
from tests.cli.life import Life, random_search
from tests.facts import each_names, unnamed
from tests.notify.receiver import Receiver
from tests.wait import DEADLINE_S, wait_for

ALL = ["RUNNING", "PAUSED", "COMPLETED", "ERROR", "CANCELED"]


@pytest.fixture
def life(tmp_path: Path) -> Life:
    return hooked(Life.submitted(tmp_path))


def hooked(life: Life, *hooks: dict[str, Any]) -> Life:
    """Write these hooks into the configuration of the experiment, and return it."""
    found = [{"command": None, "webhook": None, "mail": None, "states": ALL, **hook} for hook in hooks]
    write_json(life.folder.effective, {**(read_json(life.folder.effective) or {}), "notify": found})
    life.folder.code.mkdir(exist_ok=True)
    return life


def claims(life: Life) -> list[str]:
    return sorted(path.name for path in life.folder.notified.iterdir()) if life.folder.notified.exists() else []


def outcome(life: Life, claim: str) -> list[dict[str, str | None]]:
    hooks: list[dict[str, str | None]] = (read_json(life.folder.notified / claim) or {})["hooks"]
    return hooks


# --- the news


def test_a_trial_that_is_done_is_told_with_its_best(life: Life, receiver: Receiver) -> None:
    hooked(life, {"webhook": receiver.url()})
    life.begins()
    life.reports("validation", 200, {"accuracy": 0.97})
    assert tell_rest(life.folder) == []
    assert receiver.received == [], "it still runs"
    life.finishes()
    assert tell_rest(life.folder) == []
    ((_, news),) = receiver.received
    assert (news["experiment"], news["name"], news["state"], news["why"]) == (life.id, "digits", "COMPLETED", None)
    assert news["best"] == {"metric": "accuracy", "value": 0.97, "trial": 1}
    assert news["folder"] == str(life.folder.path)
    assert not unnamed(news["text"], f"Experiment {life.id}", "digits", "COMPLETED", "accuracy 0.97", "trial 1")


def test_of_a_search_the_best_trial_is_told(tmp_path: Path, receiver: Receiver) -> None:
    life = hooked(Life.submitted(tmp_path, **random_search(2)), {"webhook": receiver.url()})
    life.begins()
    life.reaches(0.5)
    life.reaches(0.7)
    tell_rest(life.folder)
    assert receiver.received[0][1]["best"] == {"metric": "accuracy", "value": 0.7, "trial": 2}


def test_a_failure_is_told_with_its_reason(life: Life, receiver: Receiver) -> None:
    hooked(life, {"webhook": receiver.url()})
    life.begins()
    life.ends(Cause.FAILED, Action.GIVE_UP, why="too often", failure="rank 1 on node1: ValueError: x")
    tell_rest(life.folder)
    assert not unnamed(receiver.received[0][1]["why"], "rank 1 on node1: ValueError: x", "too often")
    assert receiver.news() == [(life.id, "ERROR")]


def test_only_what_a_hook_wants_is_told(life: Life, receiver: Receiver) -> None:
    hooked(life, {"webhook": receiver.url(), "states": ["ERROR"]})
    tell_running(life.folder)
    life.begins()
    life.finishes()
    tell_rest(life.folder)
    assert (receiver.received, claims(life)) == ([], [])


def test_without_hooks_nothing_is_read_and_nothing_written(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_det.notify.change.ExperimentView", None)
    assert tell_running(life.folder) == []
    assert tell_rest(life.folder) == []
    assert claims(life) == []


# --- once


def test_each_change_is_notified_once_by_concurrent_threads(life: Life, receiver: Receiver) -> None:
    hooked(life, {"webhook": receiver.url()})
    life.begins()
    life.finishes()
    start = threading.Barrier(8)

    def tell() -> None:
        start.wait()
        tell_rest(life.folder)

    threads = [threading.Thread(target=tell) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert receiver.news() == [(life.id, "COMPLETED")]
    assert claims(life) == ["COMPLETED-1.json"]
    assert outcome(life, "COMPLETED-1.json") == [{"hook": "webhook of 127.0.0.1", "problem": None}]
    assert {path.stat().st_mode & 0o777 for path in life.folder.notified.iterdir()} == {0o600}
    assert life.folder.notified.stat().st_mode & 0o777 == 0o700


def test_whoever_reads_an_experiment_reads_what_its_hooks_were_told(life: Life, receiver: Receiver) -> None:
    hooked(life, {"webhook": receiver.url()})
    life.folder.path.chmod(SHARED_FOLDER)
    life.begins()
    life.finishes()
    tell_rest(life.folder)
    assert life.folder.notified.stat().st_mode & 0o7777 == SHARED_FOLDER


def test_a_pause_is_told_each_time(life: Life, receiver: Receiver) -> None:
    hooked(life, {"webhook": receiver.url()})
    for _ in range(2):
        life.search.pause("ada")
        tell_rest(life.folder)
        tell_rest(life.folder)
        life.search.activate()
        life.search.submitted(first=1, count=1, stay=False)
    assert claims(life) == ["PAUSED-1.json", "PAUSED-2.json"]
    assert [news["why"] for _, news in receiver.received] == ["by ada", "by ada"]


# --- hooks that fail


@pytest.mark.integration
def test_a_hook_that_fails_is_noted_and_the_others_are_told(life: Life, receiver: Receiver) -> None:
    hooked(life, {"command": ["sh", "-c", "echo no such channel; exit 1"]}, {"webhook": receiver.url()})
    life.begins()
    life.finishes()
    each_names(tell_rest(life.folder), ["command sh", "COMPLETED", 1, "no such channel"])
    assert receiver.news() == [(life.id, "COMPLETED")]
    assert [hook["problem"] is None for hook in outcome(life, "COMPLETED-1.json")] == [False, True]


@pytest.mark.integration
def test_a_hook_that_hangs_is_ended_and_the_others_are_told(
    life: Life, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time limit ends when the other hook has been notified, however slow this machine is."""
    wait = subprocess.Popen.wait

    def waits(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        wait_for(receiver.news)
        return wait(process, timeout and 0)

    monkeypatch.setattr(subprocess.Popen, "wait", waits)
    hooked(life, {"command": ["sleep", "60"]}, {"webhook": receiver.url()})
    life.begins()
    life.finishes()
    each_names(tell_rest(life.folder), ["command sleep", "COMPLETED", "20 s", "killed"])
    assert [hook["problem"] is None for hook in outcome(life, "COMPLETED-1.json")] == [False, True]


def test_a_hook_that_cannot_even_be_ended_is_left(life: Life, hooks_that_hang: None) -> None:
    """A lookup of a host name may block like this."""
    hooked(life, {"mail": "ada"})
    life.begins()
    life.finishes()
    each_names(tell_rest(life.folder), ["ada", "COMPLETED", "0.1 s"])


@pytest.fixture
def hooks_that_hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make every hook hang until the end of the test."""
    over = threading.Event()
    monkeypatch.setattr(delivery, "TIME_LIMIT_S", 0.1)
    monkeypatch.setattr("hpc_det.notify.change.LEEWAY_S", 0.1)
    monkeypatch.setattr(delivery, "send", lambda hook, news: over.wait())
    yield
    over.set()


def test_damaged_files_are_no_reason_to_fail(life: Life) -> None:
    hooked(life, {"mail": "ada"})
    life.folder.about.write_text("{")
    life.begins()
    life.finishes()
    each_names(tell_rest(life.folder), ["hooks", "HpcDetError", life.folder.about])


# --- around a worker


def test_a_worker_tells_its_beginning_and_the_end(life: Life, receiver: Receiver) -> None:
    hooked(life, {"webhook": receiver.url()})
    with hooks_told(life.folder, print) as beginning_told:
        life.begins()
        beginning_told()
        life.finishes()
    assert receiver.news() == [(life.id, "RUNNING"), (life.id, "COMPLETED")]


def test_a_worker_waits_for_no_hook_before_it_trains_or_goes_back_into_the_queue(
    life: Life, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker finishes before the answer arrives, for which the hook has a long time limit."""
    monkeypatch.setattr(delivery, "TIME_LIMIT_S", DEADLINE_S)
    receiver.answers.clear()
    hooked(life, {"webhook": receiver.url()})
    with hooks_told(life.folder, print):
        life.begins()
    wait_for(lambda: receiver.news() == [(life.id, "RUNNING")])
    receiver.answers.set()
    wait_for(lambda: outcome(life, "RUNNING-1.json"))
    assert outcome(life, "RUNNING-1.json") == [{"hook": "webhook of 127.0.0.1", "problem": None}]


def test_a_worker_exits_only_after_the_hooks_of_its_start_have_run(life: Life, receiver: Receiver) -> None:
    receiver.answers.clear()
    hooked(life, {"webhook": receiver.url()})
    left = threading.Event()

    def trained() -> None:
        with hooks_told(life.folder, print) as beginning_told:
            life.begins()
            beginning_told()
            left.set()
            life.finishes()

    worker = threading.Thread(target=trained)
    worker.start()
    wait_for(lambda: receiver.news() == [(life.id, "RUNNING")])
    assert not left.wait(0.1)
    receiver.answers.set()
    worker.join()
    assert receiver.news() == [(life.id, "RUNNING"), (life.id, "COMPLETED")]
