"""Slurm's queue, recorded on 22.05.8 with user name and working folder replaced, and commands that move jobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hpc_det.errors import UsageError
from hpc_det.plan.priority import from_nice
from hpc_det.schedulers.queue import Change, QueuedJob
from hpc_det.schedulers.scheduler import JobState, run_command
from hpc_det.schedulers.slurm.queue import SlurmQueue, parse_queue
from tests.facts import refused, unnamed
from tests.stub import Stub

RECORDED = (Path(__file__).parent / "recorded" / "queue.txt").read_text()
PARTITIONS = """PartitionName=low AllowGroups=ALL Default=YES State=UP
PartitionName=high AllowGroups=ALL Default=NO State=UP
"""
QUEUE = SlurmQueue()


def recorded(command: Sequence[str]) -> str:
    """Return the recorded answer of squeue, with the mark that the command requests."""
    assert "squeue" in command
    return RECORDED.replace("<mark>", mark_in(command))


def mark_in(command: Sequence[str]) -> str:
    return command[-1].partition("--Format=JobArrayID:")[2].partition(",")[0]


@pytest.fixture
def jobs() -> dict[str, QueuedJob]:
    """Return the recorded jobs by id; a job of two partitions as it is in the second one."""
    return {job.named: job for job in QUEUE.jobs(recorded)}


def job(job_id: str = "1", *, place: int = 1000, nice: int = 0, user: str = "ada") -> QueuedJob:
    return QueuedJob(
        job_id=job_id,
        named=job_id,
        name="digits",
        user=user,
        pool="low",
        pools=("low",),
        state=JobState.QUEUED,
        reason="Priority",
        submitted=None,
        starts=None,
        priority=from_nice(nice),
        scheduler_priority=place,
        slots=1,
        waiting=1,
        running=0,
        path="/",
    )


def commands(changes: Sequence[Change]) -> list[str]:
    return [" ".join(change.command) for change in changes]


def undone(changes: Sequence[Change]) -> list[str]:
    return [" ".join(change.undo) for change in changes]


# --- the queue


def test_what_runs_comes_first_and_the_rest_as_slurm_considers_it() -> None:
    assert [(job.job_id, job.pool) for job in QUEUE.jobs(recorded)] == [
        ("102", "high"),
        ("103_0", "low"),
        ("109", "high"),
        ("103", "low"),
        *((job_id, "low") for job_id in ("105", "106", "107", "108", "109", "112", "110", "111")),
    ]


def test_of_one_pool_others_are_left_out() -> None:
    assert [job.job_id for job in QUEUE.jobs(recorded, pool="high")] == ["102", "109"]


@pytest.mark.integration
def test_what_a_user_has_set_for_squeue_hides_no_job(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUEUE_USERS", "ada")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    stub("squeue", "env | grep -E '^(SQUEUE|SLURM)_' | sort >$(dirname $0)/env")
    folder = stub("sinfo", "").parent
    assert QUEUE.jobs(run_command) == []
    assert (folder / "env").read_text() == "SLURM_BITSTR_LEN=0\nSLURM_TIME_FORMAT=standard\n"


def test_a_job_is_read_whole(jobs: dict[str, QueuedJob]) -> None:
    digits = jobs["105"]
    assert (digits.name, digits.user, digits.state) == ("digits", "ada", JobState.QUEUED)
    assert digits.reason.startswith("Nodes required for job are DOWN")
    assert digits.starts
    assert digits.submitted
    assert digits.starts > digits.submitted
    assert (digits.priority, digits.scheduler_priority, digits.path) == (42, 1148, "/home/ada/hpc_det/experiments/12")


@pytest.mark.parametrize(
    ("reason", "dependency", "expected"),
    [
        ("Dependency", "afterany:14(unfulfilled)", ("14",)),
        ("Dependency", "afterany:15_2(unfulfilled)", ("15_2",)),
        ("Dependency", "afterok:14(unfulfilled),after:15_*+5(unfulfilled),singleton(unfulfilled)", ("14", "15")),
        ("Dependency", "afterok:14(unfulfilled)?afterany:15_*(unfulfilled)", ("14", "15")),
        ("Dependency", "singleton(unfulfilled)", ()),
        ("JobHeldUser", "afterany:14(unfulfilled)", ()),
        ("Priority", "(null)", ()),
    ],
)
def test_a_job_that_depends_on_others_alone_waits_for_them(
    reason: str, dependency: str, expected: tuple[str, ...]
) -> None:
    fields = ["16", "n", "ada", "low", "PENDING", reason, "N/A", "N/A", "0", "7", "cpu=1", "/tmp", dependency]
    (found,) = parse_queue("".join(f"{field}<mark>" for field in fields), "<mark>")
    assert found.waits_for == expected


def test_a_suspended_job_is_told_from_one_that_runs() -> None:
    suspended = RECORDED.replace("<mark>RUNNING<mark>", "<mark>SUSPENDED<mark>", 1)
    first, second, *_ = parse_queue(suspended, "<mark>")
    assert (first.job_id, first.state, first.is_suspended) == ("102", JobState.RUNNING, True)
    assert not second.is_suspended


def test_slots_are_gpus_or_cpus(jobs: dict[str, QueuedJob]) -> None:
    found = {job_id: (job.slots, job.waiting, job.running) for job_id, job in jobs.items()}
    assert [found[job_id] for job_id in ("102", "103_0", "105", "106", "108")] == [
        (8, 0, 1),
        (5, 0, 1),
        (6, 1, 0),
        (3, 1, 0),
        (1, 1, 0),
    ]


def test_a_name_with_a_newline_and_colours_is_harmless(jobs: dict[str, QueuedJob]) -> None:
    assert jobs["106"].name == r"two\nlines\x1b[31m|"


def test_holds_are_told_from_other_reasons(jobs: dict[str, QueuedJob]) -> None:
    held = {job.job_id: job.reason for job in jobs.values() if job.state is JobState.HELD}
    assert held == {"107": "BeginTime", "110": "JobHeldUser", "111": "JobHeldAdmin"}


def test_a_start_that_nobody_expects_is_none(jobs: dict[str, QueuedJob]) -> None:
    assert jobs["108"].starts is None


def test_a_nice_value_is_a_priority(jobs: dict[str, QueuedJob]) -> None:
    assert (jobs["109"].priority, jobs["109"].pools) == (60, ("high", "low"))


@pytest.mark.parametrize(
    ("shown", "named", "count"),
    [
        ("20_[0-3%2]", "20_[0-3]", 4),
        ("20_[2,4,6,8%1]", "20_[2,4,6,8]", 4),
        ("20_[4-8:2,11-12%2]", "20_[4,6,8,11,12]", 5),
    ],
)
def test_elements_that_wait_together_are_named_as_scontrol_takes_them(shown: str, named: str, count: int) -> None:
    row = f"{shown}<m>n<m>ada<m>low<m>PENDING<m>None<m>N/A<m>N/A<m>0<m>7<m>cpu=1<m>/tmp<m>(null)<m>\n"
    (array,) = parse_queue(row, "<m>")
    assert (array.job_id, array.named, array.waiting, array.reason) == ("20", named, count, "")


def test_the_default_pool_is_the_partitions_that_says_so() -> None:
    assert QUEUE.pools(lambda command: PARTITIONS) == {"low": True, "high": False}


# --- its commands


def test_a_priority_is_a_nice_value_that_can_be_taken_back() -> None:
    changes = QUEUE.prioritize(job(nice=200), 60)
    assert commands(changes) == ["scontrol update JobId=1 Nice=1800"]
    assert undone(changes) == ["scontrol update JobId=1 Nice=200"]


def test_who_may_raise_a_job_is_said_where_slurm_refuses() -> None:
    (change,) = QUEUE.prioritize(job(), 10)
    assert change.command[-1] == "Nice=-3200"
    assert not unnamed(change.who_may, "operators", "administrators", "`scontrol update JobId=1 Nice=-3200`")


def test_a_job_of_two_partitions_gets_both_back() -> None:
    (both,) = {found.named: found for found in QUEUE.jobs(recorded) if found.job_id == "109"}.values()
    assert undone(QUEUE.move(both, "debug")) == ["scontrol update JobId=109 Partition=high,low"]


def test_behind_is_one_below() -> None:
    assert commands(QUEUE.put_behind(job("1", place=1000), job("2", place=900), [])) == [
        "scontrol update JobId=1 Nice=101"
    ]


def test_a_job_that_was_lowered_rises_to_be_ahead() -> None:
    changes = QUEUE.put_ahead(job("1", place=700, nice=500), job("2", place=900), [job("3", place=800)])
    assert commands(changes) == ["scontrol update JobId=1 Nice=299"]


def test_a_job_that_cannot_rise_has_the_others_go_behind_it_in_their_order() -> None:
    changes = QUEUE.put_ahead(job("1", place=700), job("2", place=900), [job("3", place=800), job("4", place=697)])
    assert commands(changes) == ["scontrol update JobId=2 Nice=201", "scontrol update JobId=3 Nice=102"]


def test_another_users_job_does_not_go_behind() -> None:
    (change,) = QUEUE.put_ahead(job("1", place=700), job("2", place=900, user="bob"), [])
    assert change.command == ("scontrol", "update", "JobId=1", "Nice=-201")
    assert not unnamed(change.who_may, "operators")


@pytest.mark.parametrize(
    "change",
    [
        lambda held: QUEUE.prioritize(held, 60),
        lambda held: QUEUE.put_ahead(held, job("2"), []),
        lambda held: QUEUE.put_ahead(job("2"), held, []),
        lambda held: QUEUE.put_behind(held, job("2"), []),
        lambda held: QUEUE.put_behind(job("2"), held, []),
    ],
)
def test_a_held_job_has_no_place(change: Callable[[QueuedJob], list[Change]], jobs: dict[str, QueuedJob]) -> None:
    with refused(UsageError, "job 110", "JobHeldUser", "hpc-det job release 110"):
        change(jobs["110"])


@pytest.mark.parametrize(
    "change",
    [
        lambda: QUEUE.put_ahead(job("1", place=1, nice=5700), job("2", place=1, nice=5600), []),
        lambda: QUEUE.put_behind(job("1", place=700), job("2", place=1, nice=5600), []),
    ],
)
def test_there_is_no_order_at_the_low_end(change: Callable[[], list[Change]]) -> None:
    with refused(UsageError, "job 1", "hpc-det job update 1 --priority 42"):
        change()


def test_each_hold_is_lifted_its_own_way(jobs: dict[str, QueuedJob]) -> None:
    asked: list[list[str]] = []

    def run(command: Sequence[str]) -> str:
        asked.append(list(command))
        return "JobId=107\n"

    QUEUE.release(jobs["110"], run)
    QUEUE.release(jobs["107"], run)
    assert asked[0] == ["scontrol", "release", "110"]
    assert asked[-1] == ["scontrol", "update", "JobId=107", "StartTime=now"]
    QUEUE.hold(jobs["112_[0-3]"], run)
    assert asked[-1] == ["scontrol", "uhold", "112_[0-3]"]
