"""Detection of hung gangs, with a simulated clock."""

from __future__ import annotations

import time
from collections.abc import Iterable

import pytest

from hpc_det.launch.watch.hang import LEAST_S, HangJudge, HangWatch, last_first, sentence
from hpc_det.node.heartbeat import Progress
from hpc_det.node.suspension import AwakeClock
from tests.facts import unnamed
from tests.plan.plans import job_plan

HOUR_S = 3600


def training(steps: int, *, warm: bool = True) -> Progress:
    return Progress("training", steps, warm=warm, batch=steps)


def between(steps: int) -> Progress:
    return Progress("between steps", steps)


class Watched:
    """A judge that gets the progress of ranks and is asked for its verdict every second."""

    def __init__(self, *ranks: Progress, limit_s: int | None = 10) -> None:
        self.judge = HangJudge(len(ranks), limit_s)
        self.now = 0.0
        self.judge.is_hung(self.now)
        self.say(ranks)

    def say(self, ranks: Iterable[Progress]) -> None:
        for rank, progress in enumerate(ranks):
            self.judge.take(rank, progress)

    def hung_within(self, seconds: int) -> bool:
        for _ in range(seconds):
            self.now += 1
            if self.judge.is_hung(self.now):
                return True
        return False


def test_a_gang_that_makes_no_step_for_longer_than_the_limit_hangs() -> None:
    gang = Watched(training(5), training(5))
    assert not gang.hung_within(10)
    assert gang.hung_within(1)


def test_a_step_of_any_rank_starts_the_time_again() -> None:
    gang = Watched(training(5), training(5))
    for step in range(6, 20):
        assert not gang.hung_within(9)
        gang.say([training(step)])


def test_ranks_that_wait_between_steps_do_not_hide_the_one_that_hangs_in_a_step() -> None:
    assert Watched(between(6), training(5)).hung_within(11)


@pytest.mark.parametrize(
    "last",
    [between(5), training(5, warm=False), Progress("outside", 0), Progress("meeting", 0)],
    ids=["a save", "the first step", "the script's own code", "a rank that comes late"],
)
def test_what_may_take_long_is_waited_for_though_others_wait_in_a_step(last: Progress) -> None:
    assert not Watched(last, training(6)).hung_within(299)


def test_ranks_that_never_meet_hang_once_all_of_them_are_there() -> None:
    late = Watched(Progress("meeting", 0), Progress("outside", 0))
    assert not late.hung_within(2000)
    late.say([Progress("meeting", 0)] * 2)
    assert late.hung_within(301)


def test_a_rank_of_which_nothing_was_heard_is_waited_for() -> None:
    gang = Watched(training(5), training(5))
    lonely = HangJudge(2, 10)
    lonely.take(0, training(5))
    assert gang.hung_within(11)
    assert not any(lonely.is_hung(second) for second in range(100))


def test_without_a_limit_it_is_learned_from_the_longest_standstill_that_ended() -> None:
    gang = Watched(training(5), limit_s=None)
    assert gang.judge.limit_s == LEAST_S
    gang.hung_within(100)
    gang.say([training(6)])
    assert gang.judge.limit_s == 2000


def test_what_the_first_step_took_is_no_measure() -> None:
    gang = Watched(training(5, warm=False), limit_s=None)
    gang.hung_within(1000)
    gang.say([training(6)])
    assert gang.judge.limit_s == LEAST_S


def test_a_check_of_ranks_that_are_all_in_a_function_takes_time_in_proportion_to_their_number() -> None:
    judge = HangJudge(20_000, None)
    for rank in range(20_000):
        judge.take(rank, Progress("setup", 7))
    began = time.process_time()
    assert not judge.is_hung(1.0)
    assert time.process_time() - began < 5  # 10 ms; with a comparison of each pair of ranks, a minute


def test_the_ranks_furthest_behind_come_first_and_like_ones_together() -> None:
    waiting, stuck = "all_reduce (x.py:1)", "train_batch (model_def.py:7)"
    groups = last_first(
        {0: (training(5), waiting), 1: (training(5), waiting), 2: (training(5), stuck), 3: (between(4), stuck)}
    )
    assert [ranks for _, ranks in groups] == [[3], [2], [0, 1]]
    facts = [
        "rank 3: between steps, train_batch (model_def.py:7)",
        "rank 2: training, batch 5, train_batch (model_def.py:7)",
        "ranks 0-1: training, batch 5, all_reduce (x.py:1)",
    ]
    said = sentence(61.2, groups)
    assert unnamed(said, "61 s", *facts, "logs") == []
    assert sorted(facts, key=said.index) == facts


def test_of_the_stages_of_a_pipeline_the_one_comes_first_for_which_the_other_waits() -> None:
    places = ["all_reduce (distributed_c10d.py:1)", "recv (distributed_c10d.py:2)", "step (model_def.py:3)"]
    groups = last_first({rank: (training(5), places[at]) for rank, at in enumerate([0, 1, 0, 2])})
    assert [ranks for _, ranks in groups] == [[3], [1], [0, 2]]


def in_function(steps: int = 0, *, warm: bool = False) -> Progress:
    return Progress("function", steps, warm=warm)


def test_a_function_of_the_users_has_the_users_limit() -> None:
    gang = Watched(in_function(), in_function())
    assert not gang.hung_within(10)
    assert gang.hung_within(1)


def test_without_a_limit_a_function_that_no_rank_is_through_with_may_take_any_time() -> None:
    gang = Watched(in_function(), in_function(), limit_s=None)
    assert not gang.hung_within(5 * HOUR_S)


@pytest.mark.parametrize("ahead", [Progress("outside", 1), in_function(1)])
def test_a_rank_that_is_through_waits_four_hours_for_the_others(ahead: Progress) -> None:
    gang = Watched(ahead, in_function(), limit_s=None)
    assert not gang.hung_within(4 * HOUR_S)
    assert gang.hung_within(1)


def test_a_loop_that_has_reported_has_four_hours_until_its_next_report() -> None:
    gang = Watched(in_function(1, warm=True), in_function(1, warm=True), limit_s=None)
    assert not gang.hung_within(4 * HOUR_S)
    assert gang.hung_within(1)


LIMIT_S = 60


class Gang:
    """Two ranks in training that make no steps, and the watch over them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        self.asked: list[str] = []
        plan = job_plan(nodes=2, ranks_per_node=1, hang_timeout_s=LIMIT_S)
        self.rounds = HangWatch(plan, ["node1", "node2"], self.asked.append, AwakeClock())
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
        """Ask for the verdict every second, `seconds` times; return the first failure's message, or None."""
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
    assert "no answer" in str(gang.waits(10))
