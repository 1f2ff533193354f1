"""Killed submissions: every job that is left is in a listing, and no folder is in the way.

tests/chaos/test_commands.py kills commands at each of their changes on the disk.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from hpc_det.config.plain_yaml import dump_yaml, load_yaml
from hpc_det.errors import UsageError
from hpc_det.node import disk
from hpc_det.node.json_files import read_json, write_json
from hpc_det.resources import data_path
from hpc_det.schedulers.own_jobs import found_successor
from hpc_det.schedulers.slurm.scheduler import Slurm
from hpc_det.search.journal import SearchJournal
from hpc_det.store.experiments import ExperimentStore
from hpc_det.store.folders import ExperimentFolder
from hpc_det.store.submitting import Submitter, settling, submitter_of, submitting
from hpc_det.submit.again import stored
from hpc_det.submit.jobs import prepare_jobs, queue_jobs
from hpc_det.view import interrupted as interrupted_submission
from hpc_det.view.interrupted import PAUSED_BY, find_successors, settle
from hpc_det.view.state import ExperimentState, ExperimentView
from hpc_det.view.watch import Watch, state
from tests.cli.conftest import Command
from tests.cli.submissions import ARRAYS, AWAY, Queue, ends_well, in_a_process, is_settled
from tests.cli.submissions import arguments as arguments
from tests.cli.submissions import queue as queue
from tests.stub import Stub
from tests.stub import stub as stub

pytestmark = pytest.mark.integration


def test_a_job_that_was_queued_when_its_submitter_was_killed_is_its_experiments(
    hpc_det: Command, root: Path, arguments: list[str], queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KILLED", "after")
    assert in_a_process(arguments) == signal.SIGKILL
    experiment = ExperimentStore(root).existing(1)
    assert submitter_of(experiment)
    assert "QUEUED" in hpc_det("e", "list").out
    assert ExperimentView(experiment).job_ids() == queue.jobs() == ["4711"]
    assert hpc_det("e", "kill", "1").code == 0
    assert queue.jobs() == []


@pytest.mark.parametrize("command", ["kill", "pause", "describe", "wait"])
def test_any_command_that_names_the_experiment_settles_it(
    hpc_det: Command, root: Path, arguments: list[str], queue: Queue, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("KILLED", "after")
    in_a_process(arguments)
    experiment = ExperimentStore(root).existing(1)
    if command == "wait":
        assert Watch(experiment).state() is ExperimentState.QUEUED
    else:
        assert hpc_det("e", command, "1").code == 0
    assert submitter_of(experiment) is None
    assert experiment.job().exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.EIO, os.strerror(errno.EIO))])
def test_what_comes_when_the_job_is_queued_and_noted_leaves_both(
    hpc_det: Command,
    root: Path,
    arguments: list[str],
    queue: Queue,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
) -> None:
    unlink, errors = disk.unlink, [error]

    def unlink_or_fail(path: Path, *, missing_ok: bool = False) -> None:
        if path.name == "submitting.json" and errors:
            raise errors.pop()
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(disk, "unlink", unlink_or_fail)
    assert hpc_det(*arguments).code != 0
    assert ExperimentView(ExperimentStore(root).existing(1)).job_ids() == queue.jobs() == ["4711"]
    is_settled(root, queue, ExperimentState.QUEUED)


@pytest.fixture
def recorded(
    arguments: list[str], config: Path, root: Path, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> ExperimentFolder:
    """Return experiment 1 with two arrays, whose submitter was killed after it had recorded both."""
    config.write_text(ARRAYS.replace("max_trials: 5", "max_trials: 1500").replace(", max_concurrent_trials: 2", ""))
    assert in_a_process(arguments) == 0
    experiment = ExperimentStore(root).existing(1)
    write_json(experiment.submitting, asdict(replace(Submitter.here(), ticks=1)))
    return experiment


def test_jobs_that_their_submitter_has_cancelled_wait_for_activate(
    hpc_det: Command, recorded: ExperimentFolder, queue: Queue
) -> None:
    """The submitter cancelled them after an error, but could not remove the experiment."""
    for job in queue.jobs():
        (queue.folder / job).unlink()
    assert "PAUSED" in hpc_det("e", "list").out
    assert hpc_det("e", "activate", "1").code == 0
    assert ExperimentView(recorded).job_ids() == ["4711", "4712", *queue.jobs()]
    is_settled(recorded.root(), queue, ExperimentState.QUEUED)


def test_one_that_is_left_of_several_goes_on(hpc_det: Command, recorded: ExperimentFolder, queue: Queue) -> None:
    (queue.folder / "4711").unlink()
    is_settled_after_a_list(hpc_det, recorded, queue)
    assert hpc_det("e", "kill", "1").code == 0
    assert queue.jobs() == []


def test_those_that_have_begun_and_ended_are_no_reason_to_wait(
    hpc_det: Command, recorded: ExperimentFolder, queue: Queue
) -> None:
    SearchJournal(recorded).ask(0, "4711_0")
    for job in queue.jobs():
        (queue.folder / job).unlink()
    hpc_det("e", "list")
    assert state(ExperimentView(recorded)) is ExperimentState.ERROR


def test_a_scheduler_that_is_away_lets_none_wait(
    hpc_det: Command, recorded: ExperimentFolder, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("AWAY", "1")
        assert "PAUSED" not in hpc_det("e", "list").out
        assert submitter_of(recorded)
    is_settled_after_a_list(hpc_det, recorded, queue)


def is_settled_after_a_list(hpc_det: Command, experiment: ExperimentFolder, queue: Queue) -> None:
    assert "QUEUED" in hpc_det("e", "list").out
    is_settled(experiment.root(), queue, ExperimentState.QUEUED)


def test_a_second_signal_while_jobs_are_cancelled_leaves_the_experiment_with_its_job(
    hpc_det: Command, root: Path, arguments: list[str], queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def signal_comes(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("hpc_det.submit.jobs.record_job", signal_comes)
        patch.setattr(Slurm, "cancel", signal_comes)
        assert hpc_det(*arguments).code == 1
    assert "QUEUED" in hpc_det("e", "list").out
    assert ExperimentView(ExperimentStore(root).existing(1)).job_ids() == queue.jobs() == ["4711"]


def test_what_the_scheduler_never_got_waits_for_activate(
    hpc_det: Command, root: Path, arguments: list[str], queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KILLED", "before")
    in_a_process(arguments)
    assert "PAUSED" in hpc_det("e", "list").out
    assert SearchJournal(ExperimentStore(root).existing(1)).state().paused == PAUSED_BY
    monkeypatch.delenv("KILLED")
    assert hpc_det("e", "activate", "1").code == 0
    is_settled(root, queue)
    assert len(queue.jobs()) == 1
    ends_well(hpc_det, root, queue)


@pytest.mark.parametrize("command", ["activate", "continue"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_jobs_of_a_later_submission_are_found_too(
    hpc_det: Command,
    root: Path,
    arguments: list[str],
    queue: Queue,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    when: str,
) -> None:
    assert in_a_process(arguments) == 0
    hpc_det("e", "pause" if command == "activate" else "kill", "1")
    assert queue.jobs() == []
    monkeypatch.setenv("KILLED", when)
    assert in_a_process(["experiment", command, "1"]) == signal.SIGKILL
    monkeypatch.delenv("KILLED")
    hpc_det("e", "list")
    is_settled(root, queue)
    expected = ExperimentState.QUEUED if when == "after" else ExperimentState.PAUSED
    assert state(ExperimentView(ExperimentStore(root).existing(1))) is expected
    ends_well(hpc_det, root, queue)


@pytest.mark.parametrize("command", [("kill",), ("cancel",), ("delete", "--yes")])
def test_a_job_that_a_killed_kill_has_left_is_ended(
    hpc_det: Command, root: Path, arguments: list[str], queue: Queue, command: tuple[str, ...]
) -> None:
    assert in_a_process(arguments) == 0
    SearchJournal(ExperimentStore(root).existing(1)).cancel("ada")
    assert state(ExperimentView(ExperimentStore(root).existing(1))) is ExperimentState.CANCELED
    assert len(queue.jobs()) == 1
    assert hpc_det("e", command[0], "1", *command[1:]).code == 0
    assert queue.jobs() == []


def test_an_activate_that_was_killed_before_it_had_a_job_is_paused_again(
    hpc_det: Command, root: Path, arguments: list[str], queue: Queue
) -> None:
    assert in_a_process(arguments) == 0
    assert hpc_det("e", "pause", "1").code == 0
    experiment = ExperimentStore(root).existing(1)
    killed = replace(Submitter.here(first_script=2, before=1), ticks=1)
    write_json(experiment.submitting, asdict(killed))
    SearchJournal(experiment).activate()
    assert state(ExperimentView(experiment)) is ExperimentState.PAUSED
    assert hpc_det("e", "activate", "1").code == 0
    assert len(queue.jobs()) == 1


def test_an_answer_that_never_came_leaves_no_job(
    hpc_det: Command, root: Path, arguments: list[str], queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """slurmctld may queue a job and be too busy to answer."""
    monkeypatch.setenv("REFUSES", "Batch job submission failed: Socket timed out on send/recv operation")
    assert hpc_det(*arguments).code == 1
    assert queue.jobs() == []
    assert list(ExperimentStore(root).folders()) == []


@pytest.fixture
def falls_silent(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Make Slurm queue the job of the next sbatch and then give no answers, until the returned function is called."""
    with monkeypatch.context() as patch:
        patch.setenv("REFUSES", "Batch job submission failed: Socket timed out on send/recv operation")
        patch.setenv("AWAY", "1")
        yield patch.undo


@pytest.mark.parametrize("is_queued", [True, False])
@pytest.mark.parametrize("command", ["create", "activate"])
def test_an_experiment_stays_whose_job_may_be_queued_by_a_scheduler_that_fell_silent(
    hpc_det: Command,
    root: Path,
    arguments: list[str],
    queue: Queue,
    monkeypatch: pytest.MonkeyPatch,
    falls_silent: Callable[[], None],
    command: str,
    is_queued: bool,
) -> None:
    """A slurmctld that hangs may queue the job when it recovers, long after sbatch has given up."""
    if command == "activate":
        assert hpc_det(*arguments, "--paused").code == 0
    failed = hpc_det(*arguments) if command == "create" else hpc_det("e", "activate", "1")
    assert failed.code == 1
    assert "hpc-det experiment describe 1" in failed.err
    experiment = ExperimentStore(root).existing(1)
    assert state(ExperimentView(experiment)) is ExperimentState.SUBMITTING
    falls_silent()
    if not is_queued:
        (queue.folder / "4711").unlink()
    assert state(ExperimentView(experiment)) is (ExperimentState.QUEUED if is_queued else ExperimentState.PAUSED)
    is_settled(root, queue)
    assert len(queue.jobs()) == is_queued


def test_whoever_looks_while_the_scheduler_is_away_is_told_that_files_count(
    hpc_det: Command, arguments: list[str], queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    hpc_det(*arguments)
    monkeypatch.setenv("AWAY", "1")
    for command in (["list"], ["describe", "1"]):
        done = hpc_det("e", *command)
        assert (done.code, AWAY in done.err) == (0, True)
        assert "QUEUED" in done.out


@pytest.mark.parametrize("is_queued", [True, False])
def test_a_successor_whose_id_was_not_written_is_found(
    hpc_det: Command, root: Path, arguments: list[str], queue: Queue, is_queued: bool
) -> None:
    """The job was killed while it submitted its successor."""
    hpc_det(*arguments)
    experiment = ExperimentStore(root).existing(1)
    (queue.folder / "4711").unlink()
    if is_queued:
        (queue.folder / "4712").write_text(str(experiment.path))
    write_json(experiment.next_jobs(1, 0), {"jobs": ["4711"], "submitting": True})
    expected = ExperimentState.QUEUED if is_queued else ExperimentState.ERROR
    assert state(ExperimentView(experiment)) is expected
    assert ExperimentView(experiment).job_ids() == ["4711", *queue.jobs()]
    assert read_json(experiment.next_jobs(1, 0)) == {"jobs": ["4711", *queue.jobs()]}


def test_a_chain_is_recorded_with_the_script_that_it_is_of(
    hpc_det: Command, root: Path, config: Path, arguments: list[str], queue: Queue
) -> None:
    """On a site without arrays, each trial has a separate script."""
    config.write_text(ARRAYS.replace("max_trials: 5", "max_trials: 2"))
    profiles = root / "conf" / "cluster"
    profiles.mkdir(parents=True)
    says = {"max_array_size": 1, "resume": "chain", "chain_length": 1}
    profile = load_yaml(data_path("conf") / "cluster" / "slurm.yaml") | says
    (profiles / "slurm.yaml").write_text(dump_yaml(profile))
    assert hpc_det(*arguments).code == 0
    experiment = ExperimentStore(root).existing(1)
    chains = [read_json(experiment.next_jobs(script, 0)) for script in (1, 2)]
    assert chains == [{"jobs": ["4711", "4712"]}, {"jobs": ["4713", "4714"]}]


@pytest.mark.parametrize("others_wait_s", [0.0, 30.0])
def test_a_successor_that_two_commands_look_for_is_not_lost(
    hpc_det: Command,
    root: Path,
    arguments: list[str],
    queue: Queue,
    monkeypatch: pytest.MonkeyPatch,
    others_wait_s: float,
) -> None:
    hpc_det(*arguments)
    experiment = ExperimentStore(root).existing(1)
    (queue.folder / "4711").rename(queue.folder / "4712")
    write_json(experiment.next_jobs(1, 0), {"jobs": ["4711"], "submitting": True})
    monkeypatch.setattr(interrupted_submission, "OTHERS_S", others_wait_s)
    found: list[bool] = []
    another = Thread(target=lambda: found.append(find_successors(experiment)))

    def together(*arguments: Any) -> list[str]:
        monkeypatch.setattr(interrupted_submission, "found_successor", found_successor)
        another.start()
        if not others_wait_s:
            another.join()
        return found_successor(*arguments)

    monkeypatch.setattr(interrupted_submission, "found_successor", together)
    assert find_successors(experiment)
    another.join()
    assert others_wait_s or found == [True]
    assert read_json(experiment.next_jobs(1, 0)) == {"jobs": ["4711", "4712"]}


# --- while the submitter runs


@pytest.fixture
def being_submitted(hpc_det: Command, root: Path, arguments: list[str], queue: Queue) -> ExperimentFolder:
    """Return experiment 1, whose job is not in the queue yet."""
    hpc_det(*arguments, "--paused")
    experiment = ExperimentStore(root).existing(1)
    SearchJournal(experiment).activate()
    return experiment


def test_an_experiment_is_in_sight_while_its_jobs_are_submitted(
    hpc_det: Command, being_submitted: ExperimentFolder
) -> None:
    with submitting(being_submitted):
        assert "SUBMITTING" in hpc_det("e", "list").out
        described = hpc_det("e", "describe", "1", "--json")
        assert (described.code, '"state": "SUBMITTING"' in described.out) == (0, True)
        assert f"process {os.getpid()}" in described.out
        assert hpc_det("e", "list", "--state", "SUBMITTING").out.count("tiny") == 1
        assert Watch(being_submitted).state() is ExperimentState.SUBMITTING


def test_of_two_submissions_of_one_experiment_one_is_refused(
    hpc_det: Command, being_submitted: ExperimentFolder, queue: Queue
) -> None:
    SearchJournal(being_submitted).pause("ada")
    with submitting(being_submitted):
        assert hpc_det("e", "activate", "1").code == 2
    assert queue.jobs() == []
    assert hpc_det("e", "activate", "1").code == 0


def test_it_is_killed_and_not_deleted_meanwhile(hpc_det: Command, being_submitted: ExperimentFolder) -> None:
    with submitting(being_submitted):
        assert hpc_det("e", "kill", "1").code == 0
        assert hpc_det("e", "delete", "1", "--yes").code == 2
    assert hpc_det("e", "delete", "1", "--yes").code == 0


def test_a_submitter_on_another_host_counts_as_gone_when_it_is_silent(being_submitted: ExperimentFolder) -> None:
    silent = {"host": "login9", "pid": 1, "ticks": 1, "started": time.time(), "first_script": 1, "before": 0}
    write_json(being_submitted.submitting, silent)
    assert state(ExperimentView(being_submitted)) is ExperimentState.SUBMITTING
    long_ago = time.time() - 7200
    os.utime(being_submitted.submitting, (long_ago, long_ago))
    assert state(ExperimentView(being_submitted)) is ExperimentState.PAUSED


def test_one_in_a_container_of_this_host_counts_as_gone_when_it_is_silent(being_submitted: ExperimentFolder) -> None:
    """Process ids of another namespace are meaningless here."""
    inside = replace(Submitter.here(), place=f"{socket.gethostname()}-another", pid=2**22 + 1)
    write_json(being_submitted.submitting, asdict(inside))
    assert state(ExperimentView(being_submitted)) is ExperimentState.SUBMITTING
    long_ago = time.time() - 7200
    os.utime(being_submitted.submitting, (long_ago, long_ago))
    assert state(ExperimentView(being_submitted)) is ExperimentState.PAUSED


@pytest.mark.parametrize("found", ["nothing", "another"])
def test_one_that_was_taken_for_gone_calls_the_scheduler_no_more(
    being_submitted: ExperimentFolder, queue: Queue, found: str
) -> None:
    search = SearchJournal(being_submitted)
    with submitting(being_submitted):
        if found == "nothing":
            being_submitted.submitting.unlink()
        else:
            write_json(being_submitted.submitting, asdict(replace(Submitter.here(), place="login9")))
        with pytest.raises(UsageError):
            queue_jobs(prepare_jobs(stored(being_submitted, []), being_submitted, 1), being_submitted, search, [])
    assert queue.jobs() == []


# --- while another process settles it


@pytest.fixture
def interrupted(arguments: list[str], root: Path, queue: Queue, monkeypatch: pytest.MonkeyPatch) -> ExperimentFolder:
    """Return experiment 1, whose submitter was killed before its job was in the queue."""
    monkeypatch.setenv("KILLED", "before")
    in_a_process(arguments)
    monkeypatch.delenv("KILLED")
    return ExperimentStore(root).existing(1)


def test_one_command_settles_it_at_a_time(hpc_det: Command, interrupted: ExperimentFolder, queue: Queue) -> None:
    with settling(interrupted) as is_alone:
        assert is_alone
        assert "SUBMITTING" in hpc_det("e", "list").out
        assert hpc_det("e", "activate", "1").code == 2
        assert SearchJournal(interrupted).state().paused is None
    assert hpc_det("e", "activate", "1").code == 0
    assert len(queue.jobs()) == 1
    assert not interrupted.settling.exists()


def test_one_that_another_has_settled_is_left_alone(
    interrupted: ExperimentFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then the experiment is being submitted again."""

    @contextmanager
    def later(experiment: ExperimentFolder) -> Iterator[bool]:
        write_json(experiment.submitting, asdict(Submitter.here()))
        with settling(experiment) as is_alone:
            yield is_alone

    monkeypatch.setattr("hpc_det.view.interrupted.settling", later)
    assert not settle(interrupted)
    assert (submitter := submitter_of(interrupted))
    assert submitter.is_this_process
    assert SearchJournal(interrupted).state().paused is None


def test_a_full_disk_keeps_it_as_it_is(
    hpc_det: Command, interrupted: ExperimentFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("hpc_det.node.disk.link", full)
        listed = hpc_det("e", "list")
        assert (listed.code, "SUBMITTING" in listed.out) == (0, True)
    assert state(ExperimentView(interrupted)) is ExperimentState.PAUSED


def test_what_a_killed_one_has_left_of_settling_is_no_hindrance(interrupted: ExperimentFolder) -> None:
    write_json(interrupted.settling, asdict(replace(Submitter.here(), ticks=1)))
    assert state(ExperimentView(interrupted)) is ExperimentState.PAUSED


def test_a_file_server_whose_clock_is_ahead_does_not_keep_it_waiting(
    interrupted: ExperimentFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr("hpc_det.schedulers.own_jobs.SETTLES_S", 3.0)
    monkeypatch.setattr("time.sleep", waited.append)
    ahead = time.time() + 7200
    os.utime(interrupted.submitting, (ahead, ahead))
    assert settle(interrupted)
    assert max(waited) == 3.0


def test_a_scheduler_that_does_not_answer_changes_nothing(
    hpc_det: Command, root: Path, arguments: list[str], queue: Queue, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KILLED", "after")
    in_a_process(arguments)
    squeue = stub("squeue", "")
    before = squeue.read_text()
    stub("squeue", "exit 1")
    assert "SUBMITTING" in hpc_det("e", "list").out
    assert submitter_of(ExperimentStore(root).existing(1))
    squeue.write_text(before)
