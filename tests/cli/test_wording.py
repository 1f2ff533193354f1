"""The exact output of commands, as transcripts of sessions. All other tests of cli assert facts.

A better sentence changes a line of tests/cli/golden/*.txt, by hand: no test writes these files.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from platform import node

import pytest

from hpc_det.requeue import Action, Cause
from hpc_det.schedulers.scheduler import JobState
from tests.cli.conftest import Command
from tests.cli.life import FakeScheduler, Life, random_search
from tests.cli.slurm_on_paper import SlurmOnPaper

GOLDEN = Path(__file__).parent / "golden"
REPOSITORY = Path(__file__).parents[2]
TIME = re.compile(r"\d{4}-\d{2}-\d{2}T[\d:]{8}[+-][\d:]{5}|(?<!\d{4}-\d{2}-\d{2} )\b\d{2}:\d{2}:\d{2}\b")
"""A time of now, as commands print it; times from the session's files do not match."""
Session = Callable[..., str]


@pytest.fixture
def session(hpc_det: Command, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    """Return a function that runs command lines and returns a transcript: stdout, stderr after `!`, exit code."""
    monkeypatch.setenv("LOGNAME", "ada")
    monkeypatch.chdir(tmp_path)

    def run(*lines: str) -> str:
        transcript = "".join(_of_command(line, *hpc_det(*shlex.split(line))) for line in lines)
        for value, name in (
            (str(root), "STATE"),
            (str(tmp_path), "TMP"),
            (str(REPOSITORY), "REPOSITORY"),
            (f" on {node()} ", " on HOST "),
        ):
            transcript = transcript.replace(value, name)
        return TIME.sub("TIME", transcript)

    return run


def _of_command(line: str, code: int, out: str, err: str) -> str:
    problems = "".join(f"! {problem}\n" for problem in err.splitlines())
    return f"$ hpc-det {line}\n{out}{problems}[exit {code}]\n\n"


def test_every_golden_is_compared() -> None:
    compared = re.findall(r'agrees\("([\w.]+)"', Path(__file__).read_text(encoding="utf-8"))
    assert {file.name for file in GOLDEN.iterdir()} == set(compared)


def agrees(name: str, transcript: str) -> bool:
    golden = (GOLDEN / name).read_text(encoding="utf-8")
    assert transcript == golden
    return True


@pytest.fixture
def world(root: Path, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch) -> FakeScheduler:
    """Create five experiments: 1 runs, 2 is completed, 3 has failed, 4 runs two of its four trials, 5 waits."""
    running, completed, failed, search, _ = (
        Life.submitted(root, job_id=str(4711 + place), title=title, **more)
        for place, (title, more) in enumerate(
            [("digits", {}), ("words", {}), ("faces", {}), ("grid", {"workers": 2, **random_search(4)}), ("late", {})]
        )
    )
    for life in (running, completed, failed):
        life.begins()
    running.reports("training", 100, {"loss": 0.5})
    running.reports("validation", 100, {"accuracy": 0.75})
    running.saves(100, uuid="1f0c0a52-0000-4000-8000-000000000001")
    completed.reports("validation", 400, {"accuracy": 0.9})
    completed.saves(400, uuid="2e1d0a52-0000-4000-8000-000000000002")
    completed.finishes()
    failed.ends(Cause.FAILED, Action.GIVE_UP, steps=20, failure="rank 0: ValueError: no data")
    for worker in (0, 1):
        search.begins(worker)
    scheduler.states = [JobState.RUNNING]
    monkeypatch.setattr("hpc_det.client.stopping.KILL_WAIT_S", 0.0)
    monkeypatch.setattr("hpc_det.client.continuation.LEAVE_S", 0.0)
    return scheduler


def test_steering(session: Session, world: FakeScheduler) -> None:
    transcript = session(
        "e pause 1",
        "e pause 1",
        "e activate 1",
        "e activate 4",
        "e cancel 4",
        "e kill 5",
        "e kill 2",
        "e pause 3",
        "t kill 2/1",
        "e continue 1",
        "e wait 2",
        "e wait 3",
        "e kill 1,9",
    )
    assert agrees("steering.txt", transcript)


def test_editing(session: Session, world: FakeScheduler) -> None:
    transcript = session(
        "e archive 1,2",
        "e archive 2",
        "e unarchive 2",
        "e unarchive 2",
        "e label add 1 baseline paper",
        "e label remove 1 paper",
        "e label remove 1 papers",
        "e set name 1 wide",
        "e set description 1 'with dropout'",
        "e set gc-policy 2",
        "e set gc-policy 2 --save-trial-latest 0 --save-trial-best 0 --yes",
        "e set gc-policy 1 --save-trial-latest 2",
        "e delete-tb-files 1 --yes",
        "e delete-tb-files 2 --yes",
        "e cleanup",
        "e delete 1 --yes",
        "e delete 2",
        "e delete 2 --yes",
        "template remove small",
        "template create a100 missing.yaml",
        "install-det --folder bin",
        "install-det --folder bin --remove",
        "install-det --folder bin --remove",
    )
    assert agrees("editing.txt", transcript)


def test_showing(session: Session, world: FakeScheduler) -> None:
    transcript = session(
        "e list",
        "e describe 1",
        "e describe 3",
        "e describe 4",
        "e describe 9",
        "e describe x",
        "e list-trials 4",
        "e list-checkpoints 2",
        "e logs 3",
        "e logs 1 --head 1 --tail 1",
        "e logs 1 --rank 7",
        "e download 2 --sort-by f1",
        "e download 3",
        "t describe 1/1",
        "t describe 1/2",
        "t profile 1/1",
        "t download 3/1",
        "c describe 1f0c",
        "c describe nobody",
        "e list --json --csv",
        "config check missing.yaml",
    )
    assert agrees("showing.txt", transcript)


def test_the_queue(session: Session, life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_det.cli.job.list.this_user", lambda: "ada")
    paper = SlurmOnPaper("ada")
    paper.take_over(monkeypatch)
    for job in ("4711", "4712", "4714"):
        state = {"state": "RUNNING", "reason": "None"} if job == "4711" else {}
        paper.queue(job, folder=str(life.folder.path), **state)
    paper.queue("4713", user="bob", name="bobs")
    paper.queue("4715", name="notebook")
    transcript = session(
        "job list",
        "job list --resource-pool hihg",
        "job update 4712 --priority 60",
        "job update 4712 --priority 60",
        "job update 4712 --priority 100",
        "job update 4712 --weight 2",
        "job update 4714 --ahead-of 4712",
        "job update 4714 --resource-pool high",
        "job update 4715 --resource-pool high",
        "job update 4711,4713,4799 --priority 70",
        "job update 4712 --priority 20",
        "job update-batch 4712",
        "job hold 4712",
        "job hold 4711",
        "job release 4712",
        "job release 4712",
        "e set priority 1 60",
    )
    assert agrees("queue.txt", transcript)
