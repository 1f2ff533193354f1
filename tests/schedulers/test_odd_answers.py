"""Answers that are cut off, damaged or of another kind: an error in a sentence or UNKNOWN, never a wrong state."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_det.errors import HpcDetError
from hpc_det.schedulers.detect import pbs as detect_pbs
from hpc_det.schedulers.detect import slurm as detect_slurm
from hpc_det.schedulers.pbs_answers import shown, statuses, waiting
from hpc_det.schedulers.pbs_hosts import down_hosts, named_hosts
from hpc_det.schedulers.pbs_queue import PbsQueue
from hpc_det.schedulers.scheduler import JobState, scheduler
from hpc_det.schedulers.slurm_queue import SlurmQueue
from tests.odd import ODD, places, replaced
from tests.schedulers.squeue_on_paper import SqueueOnPaper

HERE = Path(__file__).parent
PBS = [path.read_text() for path in sorted((HERE / "recorded_pbs").glob("*.json"))]
FOUND = [
    path.read_text() for path in sorted((HERE / "detect" / "recorded").rglob("*")) if path.suffix in (".json", ".txt")
]
SQUEUE = "4711|RUNNING|None\n4712_1|PENDING|Resources\n4712_2|PENDING|BeginTime\n4713|COMPLETED|None\n"
WORDS = st.text(max_size=30) | st.sampled_from(["", "{}", "[]", "null", '{"Jobs": 3}', '{"Jobs": {"1.server": []}}'])


@st.composite
def damaged(draw: Callable[..., Any], samples: Sequence[str]) -> str:
    """A sample that is cut off, has other text in it, or a value of another kind."""
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
    return lambda command: output


def cut_at(length: int, numbers: Collection[int]) -> Callable[[str, int], str]:
    """Of the answers with these numbers only so much arrives."""
    return lambda answer, number: answer[:length] if number in numbers else answer


def raises_only_ours(ask: Callable[[], object]) -> None:
    """Anything else would reach the user as a traceback."""
    with suppress(HpcDetError):
        ask()


@given(damaged([SQUEUE]))
def test_slurm_knows_each_job_as_something(output: str) -> None:
    found = scheduler("slurm").status(["4711", "4712_1", "4714"], says(output))
    assert found.keys() == {"4711", "4712_1", "4714"}


@pytest.mark.parametrize("job_id", ["4710", "4711", "4712_1", "4712_2", "4712", "4713"])
def test_an_answer_of_squeue_that_is_cut_off_shows_no_wrong_state(job_id: str) -> None:
    """The first answer, the second one, or each."""
    slurm, true = scheduler("slurm"), scheduler("slurm").status([job_id], SqueueOnPaper(SQUEUE))[job_id].state
    for others in ([], ["4710"], ["4712_1"], ["4711", "4712_1", "4712_2", "4712", "4713", "4710", "4709"]):
        for numbers in ({0}, {1}, range(30)):
            for length in range(len(SQUEUE) + 20):
                squeue = SqueueOnPaper(SQUEUE, cut_at(length, numbers))
                assert slurm.status([job_id, *others], squeue)[job_id].state in (true, JobState.UNKNOWN)


@given(damaged([f"JOBID|STATE|REASON\n{SQUEUE}"]))
def test_an_answer_of_squeue_with_other_text_ends_no_job(output: str) -> None:
    """A job that is named with another state than it has cannot be told from one that has it."""
    found = scheduler("slurm").status(["4711"], says(output))["4711"]
    assert found.state is not JobState.ENDED or "4711" in output


@pytest.mark.parametrize("sample", PBS)
def test_an_answer_of_qstat_that_is_cut_off_shows_no_wrong_state(sample: str) -> None:
    ids = list(json.loads(sample).get("Jobs", {}))
    true = statuses(ids, says(sample))
    for length in range(0, len(sample), 7):
        for job_id, status in statuses(ids, says(sample[:length])).items():
            assert status.state in (true[job_id].state, JobState.UNKNOWN)


@given(damaged(PBS))
def test_pbs_knows_each_job_as_something(output: str) -> None:
    assert statuses(["1.server", "11[].pbshead"], says(output)).keys() == {"1.server", "11[].pbshead"}


@pytest.mark.parametrize(
    "ask",
    [
        lambda run: shown("11.pbshead", run),
        lambda run: waiting("11[].pbshead", run),
        lambda run: PbsQueue().jobs(run),
        lambda run: PbsQueue().pools(run),
        lambda run: PbsQueue().priority_note(run),
        lambda run: named_hosts(("2:ncpus=2", None), ["node1"], run),
        lambda run: down_hosts(["node1"], run),
        lambda run: detect_pbs.detect(run),
        lambda run: detect_slurm.detect(run),
        lambda run: SlurmQueue().jobs(run),
        lambda run: SlurmQueue().pools(run),
    ],
)
@settings(max_examples=60)
@given(output=damaged([*PBS, *FOUND, SQUEUE]))
def test_what_cannot_be_read_is_an_error_in_a_sentence(ask: Callable[..., object], output: str) -> None:
    raises_only_ours(lambda: ask(says(output)))
