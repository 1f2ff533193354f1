"""The screen that reorders waiting jobs, on a simulated Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_det.schedulers.queue import this_user
from hpc_det.schedulers.scheduler import CommandError
from tests.cli.life import Life
from tests.cli.slurm_on_paper import SlurmOnPaper
from tests.cli.top.test_app import Seen, life, live, tell

__all__ = ["life", "live"]
pytestmark = pytest.mark.integration


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch, life: Life) -> SlurmOnPaper:
    """Return a queue with 4711 (running), 4712 and 4714 of experiment 1, and 4713 of another user."""
    paper = SlurmOnPaper(this_user())
    paper.take_over(monkeypatch)
    folder = str(life.folder.path)
    paper.queue("4711", state="RUNNING", reason="None", folder=folder)
    paper.queue("4712", folder=folder, reason="Resources")
    paper.queue("4713", user="bob", folder="/home/bob")
    paper.queue("4714", folder=folder)
    return paper


def place(seen: Seen, text: str) -> int:
    return seen.text.find(text)


def test_only_own_waiting_jobs_are_listed_in_scheduling_order(root: Path, slurm: SlurmOnPaper) -> None:
    async def story(seen: Seen) -> None:
        await seen.press("r")
        await seen.until(lambda: -1 < place(seen, "4712") < place(seen, "4714"))
        assert "4711" not in seen.text
        assert "4713" not in seen.text
        assert "u earlier" in seen.text
        await seen.press("escape")
        await seen.until(lambda: "p pause" in seen.text)

    tell(root, story)


def test_a_job_is_moved_past_its_neighbour_and_stays_selected(root: Path, slurm: SlurmOnPaper) -> None:
    async def story(seen: Seen) -> None:
        await seen.press("r")
        await seen.until(lambda: "4714" in seen.text)
        await seen.press("down", "u")
        await seen.says("Job 4714 is ahead of job 4712 now")
        assert slurm.order().index("4714") < slurm.order().index("4712")
        await seen.until(lambda: place(seen, "4714  ") < place(seen, "4712  "))
        await seen.press("u")
        await seen.says("job 4714 is the first of your jobs in its pool")
        await seen.press("d")
        await seen.says("Job 4714 is behind job 4712 now")

    tell(root, story)


def test_a_priority_is_asked_for_and_set(root: Path, slurm: SlurmOnPaper) -> None:
    async def story(seen: Seen) -> None:
        await seen.press("r")
        await seen.until(lambda: "4712" in seen.text)
        await seen.press("p")
        await seen.says("Priority of job 4712")
        await seen.press("6", "0", "enter")
        await seen.says("Job 4712 has priority 60 now")
        assert slurm.jobs["4712"].nice > 0
        await seen.press("p")
        await seen.says("Priority of job 4712")
        await seen.press("x", "enter")
        await seen.says("'x' is not a priority")

    tell(root, story)


def test_a_job_is_held_and_released(root: Path, slurm: SlurmOnPaper) -> None:
    async def story(seen: Seen) -> None:
        await seen.press("r")
        await seen.until(lambda: "4712" in seen.text)
        await seen.press("h")
        await seen.says("Holding job 4712")
        await seen.press("r")
        await seen.says("Released job 4712")
        assert slurm.changes == ["scontrol uhold 4712", "scontrol release 4712"]

    tell(root, story)


def test_an_error_of_the_scheduler_is_shown_and_ends_nothing(
    root: Path, slurm: SlurmOnPaper, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(seen: Seen) -> None:
        await seen.press("r")
        await seen.until(lambda: "4712" in seen.text)
        await seen.press("p")
        await seen.says("Priority of job 4712")
        await seen.press("1", "enter")
        await seen.says("only the site's operators")

        def refuse(command: object) -> str:
            raise CommandError("squeue: no answer")

        monkeypatch.setattr("hpc_det.cli.job.list.run_command", refuse)
        monkeypatch.setattr("hpc_det.cli.job.hold.run_command", refuse)
        await seen.press("h")
        await seen.says("squeue: no answer")
        await seen.press("escape")
        await seen.until(lambda: "p pause" in seen.text)

    tell(root, story)


def test_a_machine_without_a_scheduler_says_so(root: Path, life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_det.cli.job.list.schedulers_here", lambda which: [])

    async def story(seen: Seen) -> None:
        await seen.press("r")
        await seen.says("this machine has no scheduler")

    tell(root, story)
