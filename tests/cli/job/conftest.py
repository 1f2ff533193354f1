from __future__ import annotations

import json

import pytest

from hpc_det.schedulers.queue import this_user
from tests.cli.conftest import Command
from tests.cli.life import Life
from tests.cli.slurm_on_paper import SlurmOnPaper
from tests.stub import stub as stub


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> SlurmOnPaper:
    """Return a simulated Slurm with an empty queue, in the place of this machine's scheduler."""
    paper = SlurmOnPaper(this_user())
    paper.take_over(monkeypatch)
    return paper


@pytest.fixture
def queue(slurm: SlurmOnPaper, life: Life) -> SlurmOnPaper:
    """Fill the queue: 4711 (running), 4712 and 4714 of experiment 1, 4713 of bob, and 4715 of no experiment."""
    folder = str(life.folder.path)
    slurm.queue("4711", state="RUNNING", reason="None", folder=folder)
    slurm.queue("4712", folder=folder, reason="Resources")
    slurm.queue("4713", user="bob", name="bobs", folder="/home/bob/hpc_det/experiments/1")
    slurm.queue("4714", folder=folder)
    slurm.queue("4715", name="notebook")
    return slurm


def records(hpc_det: Command, *arguments: str) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(hpc_det("job", "list", "--json", *arguments).out)
    return found
