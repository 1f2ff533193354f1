from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpc_det.node.json_files import read_json, write_json
from hpc_det.schedulers import shared_answers
from hpc_det.schedulers.scheduler import JobState, JobStatus, Run, run_command
from hpc_det.schedulers.shared_answers import SharedAnswers
from hpc_det.schedulers.slurm.scheduler import Slurm

RUNS = JobStatus(JobState.RUNNING, "", ("7_1",))


class Site(Slurm):
    """A Slurm on which every job runs, and which records the requested ids."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def status(self, job_ids: Sequence[str], run: Run) -> dict[str, JobStatus]:
        self.asked.append(sorted(job_ids))
        return dict.fromkeys(job_ids, RUNS)


@pytest.fixture
def site() -> Site:
    return Site()


@pytest.fixture(autouse=True)
def moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all requests of a test count as simultaneous, however slow the machine is."""
    monkeypatch.setattr(shared_answers, "ASK_S", 1000)
    monkeypatch.setattr(shared_answers, "PATIENCE_S", 1000)


@pytest.fixture
def answers(tmp_path: Path, site: Site) -> SharedAnswers:
    return SharedAnswers(tmp_path, site)


def test_many_processes_ask_once(tmp_path: Path, site: Site) -> None:
    found = [SharedAnswers(tmp_path, site).status(["7"], run_command) for _ in range(5)]
    assert found == [{"7": RUNS}] * 5
    assert site.asked == [["7"]]


def test_a_status_below_another_users_root_writes_nothing_there(
    tmp_path: Path, site: Site, answers: SharedAnswers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: tmp_path.stat().st_uid + 1)
    assert answers.status(["7"], run_command) == {"7": RUNS}
    assert list(tmp_path.iterdir()) == []


def test_threads_that_ask_at_the_same_moment_ask_once(tmp_path: Path, site: Site) -> None:
    threads = [
        threading.Thread(target=SharedAnswers(tmp_path, site).status, args=(["7"], run_command)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert site.asked == [["7"]]


def test_a_job_that_nobody_asked_about_waits_its_turn_and_takes_the_others_along(
    answers: SharedAnswers, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers.status(["7"], run_command)
    assert answers.news(["8"], run_command, max_age_s=2) is None
    monkeypatch.setattr(shared_answers, "ASK_S", 0)
    assert answers.news(["8"], run_command, max_age_s=2) == {"8": RUNS}
    assert site.asked == [["7"], ["7", "8"]]


def test_jobs_that_nobody_wants_any_more_are_dropped(
    answers: SharedAnswers, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_answers, "ASK_S", 0)
    monkeypatch.setattr(shared_answers, "WANTED_S", 0)
    for job in ("7", "8"):
        answers.news([job], run_command, max_age_s=0)
    assert site.asked == [["7"], ["8"]]


def test_the_mark_of_a_process_that_died_while_asking_expires(
    answers: SharedAnswers, site: Site, tmp_path: Path
) -> None:
    mark = tmp_path / ".scheduler" / "site.asking"
    mark.parent.mkdir()
    mark.touch()
    assert answers.news(["7"], run_command, max_age_s=2) is None
    long_ago = time.time() - 1000
    os.utime(mark, (long_ago, long_ago))
    assert answers.news(["7"], run_command, max_age_s=2) == {"7": RUNS}
    assert not mark.exists()


def test_a_process_that_waits_for_one_that_died_while_asking_asks_in_the_end(
    answers: SharedAnswers, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_answers, "PATIENCE_S", 0.1)
    mark = tmp_path / ".scheduler" / "site.asking"
    mark.parent.mkdir()
    mark.touch()
    assert answers.status(["7"], run_command) == {"7": RUNS}


def test_what_was_heard_before_a_moment_can_be_refused(
    answers: SharedAnswers, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers.status(["7"], run_command)
    monkeypatch.setattr(shared_answers, "ASK_S", 0)
    answers.status(["7"], run_command, since=time.time())
    assert site.asked == [["7"], ["7"]]


def test_an_answer_to_a_question_from_before_a_moment_can_be_refused(
    answers: SharedAnswers, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments: list[float] = []

    def status(job_ids: Sequence[str], run: Run) -> dict[str, JobStatus]:
        moments.append(time.time())
        time.sleep(0.05)  # simulates a busy controller
        return Site.status(site, job_ids, run)

    monkeypatch.setattr(site, "status", status)
    monkeypatch.setattr(shared_answers, "ASK_S", 0)
    answers.status(["7"], run_command)
    answers.status(["7"], run_command, since=moments[0])
    assert site.asked == [["7"], ["7"]]


def test_an_answer_from_the_future_is_an_old_one(answers: SharedAnswers, site: Site, tmp_path: Path) -> None:
    answers.status(["7"], run_command)
    file = tmp_path / ".scheduler" / "site.json"
    write_json(file, (read_json(file) or {}) | {"answered": time.time() + 3600})
    answers.status(["7"], run_command)
    assert site.asked == [["7"], ["7"]]


@pytest.mark.parametrize("content", ["", "null", '{"asked": 17', '{"jobs": {}}', "[17]"])
def test_a_damaged_file_is_no_answer(answers: SharedAnswers, site: Site, tmp_path: Path, content: str) -> None:
    file = tmp_path / ".scheduler" / "site.json"
    file.parent.mkdir()
    file.write_text(content)
    assert answers.status(["7"], run_command) == {"7": RUNS}


def test_where_nothing_can_be_shared_everybody_asks(site: Site, tmp_path: Path) -> None:
    (tmp_path / ".scheduler").touch()
    found = [SharedAnswers(tmp_path, site).status(["7"], run_command) for _ in range(2)]
    assert found == [{"7": RUNS}] * 2


def test_the_answers_are_the_owners_alone(answers: SharedAnswers, tmp_path: Path) -> None:
    answers.status(["7"], run_command)
    folder = tmp_path / ".scheduler"
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())]
    assert modes == [0o700, 0o600]
