"""Truncated, damaged or unexpected answers: a one-sentence error or UNKNOWN, never a wrong state.

Covers squeue, scontrol, sinfo, qstat and pbsnodes; hpc-det never calls sacct.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_det.errors import HpcDetError
from hpc_det.requeue import Cause
from hpc_det.schedulers.pbs import detect as detect_pbs
from hpc_det.schedulers.pbs.answers import shown, statuses, waiting
from hpc_det.schedulers.pbs.hosts import down_hosts, named_hosts
from hpc_det.schedulers.pbs.queue import PbsQueue
from hpc_det.schedulers.pbs.scheduler import Pbs
from hpc_det.schedulers.scheduler import JobState, scheduler
from hpc_det.schedulers.slurm import detect as detect_slurm
from hpc_det.schedulers.slurm.queue import SlurmQueue
from hpc_det.schedulers.slurm.scheduler import Slurm
from hpc_det.sgd.driver.failures import back_into_queue
from tests.odd import KINDS, ODD, places, replaced
from tests.plan.plans import job_plan
from tests.schedulers.slurm.squeue_on_paper import SqueueOnPaper
from tests.schedulers.slurm.test_queue import mark_in
from tests.schedulers.slurm.test_scheduler import NOW, slurm_time
from tests.schedulers.slurm.test_scheduler import shown as shown_by_slurm

HERE = Path(__file__).parent
PBS = [path.read_text() for path in sorted((HERE / "pbs" / "recorded").glob("*.json"))]
NODES = (HERE / "pbs" / "recorded" / "pbsnodes-one-down.json").read_text()
FOUND = [path.read_text() for path in sorted((HERE / "recorded_sites").rglob("*")) if path.suffix in (".json", ".txt")]
SQUEUE = "4711|RUNNING|None\n4712_1|PENDING|Resources\n4712_2|PENDING|BeginTime\n4713|COMPLETED|None\n"
QUEUE = (HERE / "slurm" / "recorded" / "queue.txt").read_text()
JOB, ARRAY = "47.pbshead", "54[].pbshead"
T = TypeVar("T")
WORDS = st.text(max_size=30) | st.sampled_from(["", "{}", "[]", "null", '{"Jobs": 3}', '{"Jobs": {"1.server": []}}'])


@st.composite
def damaged(draw: Callable[..., Any], samples: Sequence[str]) -> str:
    """Draw a sample that is truncated, contains other text or a value of another type, or is replaced."""
    sample: str = draw(st.sampled_from(samples))
    begin: int = draw(st.integers(0, len(sample)))
    match draw(st.sampled_from(["cut off", "other text", "other value", "other answer"])):
        case "cut off":
            return sample[:begin]
        case "other text":
            end = draw(st.integers(begin, min(begin + 40, len(sample))))
            return f"{sample[:begin]}{draw(st.text(max_size=20))}{sample[end:]}"
        case "other value" if sample.startswith("{"):
            tree = json.loads(sample)
            return json.dumps(replaced(tree, draw(st.sampled_from(places(tree))), draw(ODD)))
        case _:
            other: str = draw(WORDS)
            return other


def says(output: str) -> Callable[[Sequence[str]], str]:
    """Return a `run` that returns this output, with the mark that a call of squeue requests."""
    return lambda command: output.replace("<mark>", mark_in(command))


def cut_at(length: int, numbers: Collection[int]) -> Callable[[str, int], str]:
    """Return a `cut` that truncates the answers with these numbers to `length` characters."""
    return lambda answer, number: answer[:length] if number in numbers else answer


def cut_anywhere(answer: str) -> list[str]:
    """Return the answer truncated at each position, or at about 500 positions of a long one."""
    return [answer[:length] for length in range(0, len(answer), 1 + len(answer) // 500)]


def or_none(ask: Callable[[], T]) -> T | None:
    """Return None if the answer is refused with an HpcDetError."""
    try:
        return ask()
    except HpcDetError:
        return None


def raises_only_ours(ask: Callable[[], object]) -> None:
    """Call `ask` and suppress HpcDetError; any other error would reach the user as a traceback."""
    with suppress(HpcDetError):
        ask()


@given(damaged([SQUEUE]))
def test_slurm_knows_each_job_as_something(output: str) -> None:
    found = scheduler("slurm").status(["4711", "4712_1", "4714"], says(output))
    assert found.keys() == {"4711", "4712_1", "4714"}


@pytest.mark.parametrize("job_id", ["4710", "4711", "4712_1", "4712_2", "4712", "4713"])
def test_an_answer_of_squeue_that_is_cut_off_shows_no_wrong_state(job_id: str) -> None:
    """The first answer, the second one or all of them are truncated."""
    slurm, true = scheduler("slurm"), scheduler("slurm").status([job_id], SqueueOnPaper(SQUEUE))[job_id].state
    for others in ([], ["4710"], ["4712_1"], ["4711", "4712_1", "4712_2", "4712", "4713", "4710", "4709"]):
        for numbers in ({0}, {1}, range(30)):
            for length in range(len(SQUEUE) + 20):
                squeue = SqueueOnPaper(SQUEUE, cut_at(length, numbers))
                assert slurm.status([job_id, *others], squeue)[job_id].state in (true, JobState.UNKNOWN)


@given(damaged([f"JOBID|STATE|REASON\n{SQUEUE}"]))
def test_an_answer_of_squeue_with_other_text_ends_no_job(output: str) -> None:
    """If the damaged output gives the job another valid state, that cannot be detected."""
    found = scheduler("slurm").status(["4711"], says(output))["4711"]
    assert found.state is not JobState.ENDED or "4711" in output


@pytest.mark.integration
@pytest.mark.parametrize("sample", PBS)
def test_an_answer_of_qstat_that_is_cut_off_shows_no_wrong_state(sample: str) -> None:
    ids = list(json.loads(sample).get("Jobs", {}))
    true = statuses(ids, says(sample))
    for part in cut_anywhere(sample):
        for job_id, status in statuses(ids, says(part)).items():
            assert status.state in (true[job_id].state, JobState.UNKNOWN)


ENDS = [
    ("RUNNING", "None", 0, slurm_time(NOW), Cause.PREEMPTED),
    ("COMPLETING", "None", 0, slurm_time(NOW), Cause.PREEMPTED),
    ("COMPLETING", "None", 12, "None", Cause.PREEMPTED),
    ("COMPLETING", "None", 0, "None", Cause.CANCELLED),
    ("COMPLETING", "TimeLimit", 0, "None", Cause.TIME_LIMIT),
    ("COMPLETING", "NodeDown", 0, "None", Cause.NODE_LOST),
]


@pytest.mark.parametrize(("state", "reason", "restarts", "preempted", "cause"), ENDS)
def test_an_answer_of_scontrol_that_is_cut_off_shows_no_wrong_cause_and_requeues_nothing_twice(
    state: str, reason: str, restarts: int, preempted: str, cause: Cause
) -> None:
    """An unreadable answer counts as a preemption, like a missing scontrol."""
    slurm, env, plan = Slurm(), {"SLURM_JOB_ID": "99", "SLURM_RESTART_COUNT": "1"}, job_plan(time_limit_min=2)
    whole = shown_by_slurm(end=slurm_time(NOW), preempted=preempted) + "\n"
    whole = whole.replace("JobState=RUNNING Reason=None", f"JobState={state} Reason={reason}")
    whole = whole.replace("Restarts=0", f"Restarts={restarts}")
    assert slurm.stop_cause(plan, env, NOW, says(whole)) is cause
    for part in cut_anywhere(whole):
        assert slurm.stop_cause(plan, env, NOW, says(part)) in (cause, Cause.PREEMPTED)
        assert slurm.ends_at(plan, env, says(part)) in (NOW, None)
        asked: list[Sequence[str]] = []
        assert "cancelled" not in back_into_queue(env, heard(part, asked)) or cause is Cause.CANCELLED
        assert all("show" in command for command in asked) or not part


def heard(answer: str, asked: list[Sequence[str]]) -> Callable[[Sequence[str]], str]:
    """Return a `run` that records each command and returns this answer."""

    def run(command: Sequence[str]) -> str:
        asked.append(command)
        return answer

    return run


def test_an_answer_of_sinfo_that_is_cut_off_calls_no_other_node_down() -> None:
    slurm, hosts = Slurm(), [f"node{number}" for number in range(130)]
    whole = "node12\nnode129\n"
    assert slurm.down_hosts(hosts, says(whole)) == ["node12", "node129"]
    for part in cut_anywhere(whole):
        assert {*slurm.down_hosts(hosts, says(part))} <= {"node12", "node129"}


def test_an_answer_of_squeue_about_the_queue_that_is_cut_off_shows_no_wrong_job() -> None:
    """It may show fewer jobs, or a job in fewer of its partitions."""
    true = [replace(job, pools=()) for job in SlurmQueue().jobs(says(QUEUE))]
    assert len(true) > 10
    for part in cut_anywhere(QUEUE):
        found = or_none(lambda part=part: SlurmQueue().jobs(says(part)))  # type: ignore[misc]
        assert all(replace(job, pools=()) in true for job in found or [])


def test_an_answer_of_pbsnodes_that_is_cut_off_calls_no_other_node_down_and_names_none_that_is() -> None:
    hosts, two = ["pbsn1", "pbsn2", "pbsn3"], ("2:ncpus=2", None)
    named = named_hosts(two, [], says(NODES))
    assert "pbsn3" not in named
    assert down_hosts(hosts, says(NODES)) == ["pbsn3"]
    for part in cut_anywhere(NODES):
        assert or_none(lambda part=part: down_hosts(hosts, says(part))) in (["pbsn3"], None)  # type: ignore[misc]
        assert or_none(lambda part=part: named_hosts(two, [], says(part))) in (named, None)  # type: ignore[misc]


@given(damaged([shown_by_slurm(end=slurm_time(NOW)) + "\n"]))
def test_an_odd_answer_of_scontrol_is_some_cause(output: str) -> None:
    plan, env = job_plan(time_limit_min=2), {"SLURM_JOB_ID": "99"}
    assert isinstance(Slurm().stop_cause(plan, env, NOW, says(output)), Cause)
    assert isinstance(Slurm().ends_at(plan, env, says(output)), float | None)
    assert isinstance(back_into_queue(env, says(output)), str)


@given(damaged(PBS))
def test_pbs_knows_each_job_as_something(output: str) -> None:
    assert statuses([JOB, ARRAY], says(output)).keys() == {JOB, ARRAY}


def test_the_recorded_answers_have_what_is_asked_about() -> None:
    """Otherwise the tests above could not notice any damage."""
    assert all(any(f'"{name}"' in sample for sample in PBS) for name in (JOB, ARRAY, "pbsn1"))
    assert len(SlurmQueue().jobs(says(QUEUE))) > 10


ABOUT_A_JOB: list[Callable[..., object]] = [
    lambda run: shown(JOB, run),
    lambda run: PbsQueue().jobs(run),
    lambda run: Pbs().stop_cause(job_plan(), {"PBS_JOBID": JOB}, NOW, run),
    lambda run: Pbs().ends_at(job_plan(), {"PBS_JOBID": JOB}, run),
    lambda run: Pbs().avoid(JOB, ["pbsn1"], run),
    lambda run: Pbs().requeue(JOB, {}, run),
]
ABOUT_OTHERS: list[Callable[..., object]] = [
    lambda run: waiting(ARRAY, run),
    lambda run: PbsQueue().pools(run),
    lambda run: PbsQueue().priority_note(run),
    lambda run: named_hosts(("2:ncpus=2", None), ["pbsn1"], run),
    lambda run: down_hosts(["pbsn1"], run),
    lambda run: detect_pbs.detect(run),
    lambda run: detect_slurm.detect(run),
    lambda run: SlurmQueue().jobs(run),
    lambda run: SlurmQueue().pools(run),
    lambda run: Slurm().down_hosts(["node1"], run),
    lambda run: Slurm().stop_cause(job_plan(), {"SLURM_JOB_ID": "99"}, NOW, run),
    lambda run: Slurm().requeue("99", {}, run),
]


@pytest.mark.parametrize("ask", [*ABOUT_A_JOB, *ABOUT_OTHERS])
@given(output=damaged([*PBS, *FOUND, SQUEUE, QUEUE]))
def test_what_cannot_be_read_is_an_error_in_a_sentence(ask: Callable[..., object], output: str) -> None:
    raises_only_ours(lambda: ask(says(output)))


@pytest.mark.long
@pytest.mark.parametrize("ask", ABOUT_A_JOB)
def test_so_is_a_value_of_any_other_kind_in_any_place(ask: Callable[..., object]) -> None:
    tree = json.loads(next(sample for sample in PBS if f'"{JOB}"' in sample))
    for place in places(tree):
        for kind in KINDS:
            raises_only_ours(partial(ask, says(json.dumps(replaced(tree, place, kind)))))
