"""Node 0 asks the ranks of a gang how far they are: in this process, with a clock of the test's."""

from __future__ import annotations

import pytest

from hpc_det.launch.watch.rounds import Rounds
from hpc_det.node.suspension import AwakeClock
from tests.plan.plans import job_plan

LIMIT_S = 60


class Gang:
    """Two ranks that train and stand still."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        self.asked: list[str] = []
        plan = job_plan(nodes=2, ranks_per_node=1, hang_timeout_s=LIMIT_S)
        self.rounds = Rounds(plan, ["node1", "node2"], self.asked.append, AwakeClock())
        for rank in (0, 1):
            self.says(rank)

    def says(self, rank: int, **more: str) -> None:
        progress = {"phase": "training", "steps": 7, "alone": False, "warm": True, "batch": 7}
        self.rounds.take([{"heartbeat": rank, **progress, **more}])

    def until_stacks_are_asked_for(self) -> None:
        until = self.now + 2 * LIMIT_S
        while "stacks" not in self.asked:
            assert self.now < until
            assert self.waits(1) is None

    def waits(self, seconds: int) -> str | None:
        """The verdict, asked for every second."""
        for _ in range(seconds):
            self.now += 1
            if failure := self.rounds.failure():
                return failure.message
        return None


@pytest.fixture
def gang(monkeypatch: pytest.MonkeyPatch) -> Gang:
    return Gang(monkeypatch)


def test_ranks_that_stand_still_are_asked_for_their_stacks_and_then_there_is_a_verdict(gang: Gang) -> None:
    assert gang.waits(LIMIT_S - 2) is None
    assert "stacks" not in gang.asked
    gang.until_stacks_are_asked_for()
    assert gang.asked.count("stacks") == 1
    gang.says(0, at="all_reduce")
    gang.says(1, at="my_function")
    assert "my_function" in str(gang.waits(1))


def test_the_time_in_which_a_job_was_suspended_is_no_standstill(gang: Gang) -> None:
    gang.waits(LIMIT_S // 2)
    gang.now += 3600
    assert gang.waits(LIMIT_S // 3) is None
    assert "stacks" not in gang.asked
    gang.until_stacks_are_asked_for()


def test_ranks_that_were_suspended_while_they_should_show_their_stacks_have_time_to(gang: Gang) -> None:
    gang.until_stacks_are_asked_for()
    gang.now += 3600
    assert gang.waits(1) is None
    assert "no answer from its node" in str(gang.waits(10))
