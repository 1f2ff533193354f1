"""Node 0's questions to the scheduler about nodes that do not arrive."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hpc_det.launch.watch import peers
from hpc_det.launch.watch.peers import Arrivals
from hpc_det.schedulers.scheduler import CommandError, NoAnswer
from tests.wait import wait_for


@pytest.fixture(autouse=True)
def _asks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "ASK_EVERY_S", 0.0)


class Answers:
    """A stand-in for sinfo: each call returns the next answer, or raises it; the last one is repeated."""

    def __init__(self, *answers: str | CommandError) -> None:
        self.answers = list(answers)
        self.asked = 0

    def __call__(self, command: Sequence[str]) -> str:
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, CommandError):
            raise answer
        return answer


def test_a_scheduler_that_was_away_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sinfo = Answers(NoAnswer("sinfo: away"), "node2\n")
    monkeypatch.setattr(peers, "run_command", sinfo)
    waits = Arrivals("slurm", ["node1", "node2", "node3"])
    wait_for(lambda: waits.down([1, 2]) == [1])


def test_a_node_without_the_command_does_not_try_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sinfo = Answers(CommandError("sinfo: not found on PATH"))
    monkeypatch.setattr(peers, "run_command", sinfo)
    waits = Arrivals("slurm", ["node1", "node2"])
    waits.down([1])
    wait_for(lambda: sinfo.asked == 1 and waits._asking is not None and not waits._asking.is_alive())
    assert waits.down([1]) == []
    assert sinfo.asked == 1
