"""Decisions after an attempt: histories, and the action that each must lead to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_det.requeue import NO_PROGRESS_LIMIT, Action, AttemptEnd, Cause, Decision, decide, repeats_failure
from tests.facts import unnamed

TRANSIENT = (Cause.PREEMPTED, Cause.TIME_LIMIT, Cause.NODE_LOST)


def ended(cause: Cause, steps: int = 0) -> AttemptEnd:
    return AttemptEnd(cause=cause, steps=steps)


def failed(steps: int = 0, *, user_error: bool = False) -> AttemptEnd:
    return AttemptEnd(cause=Cause.FAILED, steps=steps, user_error=user_error)


def preempted(steps: int = 0) -> AttemptEnd:
    return ended(Cause.PREEMPTED, steps)


@pytest.mark.parametrize(
    ("history", "max_restarts", "action"),
    [
        pytest.param([ended(Cause.FINISHED)], 0, Action.DONE, id="finished"),
        pytest.param([failed(), failed(), ended(Cause.FINISHED)], 2, Action.DONE, id="finished after failures"),
        pytest.param([ended(Cause.CANCELLED)], 5, Action.DONE, id="cancelled"),
        pytest.param([preempted()], 0, Action.REQUEUE, id="preempted costs no restart"),
        pytest.param([ended(Cause.TIME_LIMIT)], 0, Action.REQUEUE, id="time limit costs no restart"),
        pytest.param([ended(Cause.NODE_LOST)], 0, Action.REQUEUE, id="a lost node costs no restart"),
        pytest.param([failed()], 0, Action.GIVE_UP, id="no restart allowed"),
        pytest.param([failed()], 1, Action.RESTART, id="the first of one"),
        pytest.param([failed(), failed()], 1, Action.GIVE_UP, id="the second of one"),
        pytest.param([failed(10), failed(20), failed(30)], 2, Action.GIVE_UP, id="progress gives no restart back"),
        pytest.param([failed(), preempted(5), failed(5)], 2, Action.RESTART, id="only failures count"),
        pytest.param([preempted(9), failed(user_error=True)], 5, Action.GIVE_UP, id="the user's error"),
        pytest.param([failed(user_error=True), failed()], 5, Action.RESTART, id="an earlier user's error"),
        pytest.param([preempted()] * (NO_PROGRESS_LIMIT - 1), 0, Action.REQUEUE, id="not yet stuck"),
        pytest.param([preempted()] * NO_PROGRESS_LIMIT, 0, Action.GIVE_UP, id="stuck before the first checkpoint"),
        pytest.param([preempted(7)] * NO_PROGRESS_LIMIT, 0, Action.REQUEUE, id="the first of these made progress"),
        pytest.param([preempted(7)] * (NO_PROGRESS_LIMIT + 1), 0, Action.GIVE_UP, id="stuck at a checkpoint"),
        pytest.param([*[preempted()] * 4, preempted(1), *[preempted(1)] * 4], 0, Action.REQUEUE, id="progress resets"),
        pytest.param([failed(), *[preempted()] * 4], 1, Action.GIVE_UP, id="a failure makes no progress either"),
        pytest.param(
            [ended(cause) for cause in (*TRANSIENT, *TRANSIENT)], 0, Action.GIVE_UP, id="stuck in different ways"
        ),
        pytest.param(
            [preempted(9), *[preempted(3)] * 5], 0, Action.GIVE_UP, id="an older checkpoint does not count as progress"
        ),
    ],
)
def test_what_follows_a_history(history: list[AttemptEnd], max_restarts: int, action: Action) -> None:
    assert decide(history, max_restarts).action is action


def test_giving_up_says_both_numbers() -> None:
    assert not unnamed(decide([failed(), failed()], 1).why, "failure 2", "max_restarts is 1")


def with_error(failure: str, steps: int = 0) -> AttemptEnd:
    return AttemptEnd(cause=Cause.FAILED, steps=steps, failure=failure)


LOSS = "rank 0 on node1: ValueError: loss is nan at batch 7 (model_def.py:23)"
ELSEWHERE, LATER = LOSS.replace("rank 0 on node1", "rank 3 on node2"), LOSS.replace("batch 7", "batch 9")


@pytest.mark.parametrize(
    ("history", "is_repeated"),
    [
        pytest.param([with_error(LOSS)], False, id="the first failure"),
        pytest.param([with_error(LOSS), with_error(LOSS)], True, id="the same"),
        pytest.param([with_error(LOSS), with_error(ELSEWHERE)], True, id="rank"),
        pytest.param([with_error(LOSS), with_error(LATER)], True, id="another number"),
        pytest.param([with_error(LOSS), with_error(LOSS, steps=5)], False, id="progress in between"),
        pytest.param([with_error(LOSS), with_error("rank 0 on node1: KeyError: 'x'")], False, id="another error"),
        pytest.param([with_error(LOSS), preempted(), with_error(LOSS)], False, id="a preemption in between"),
        pytest.param([failed(), failed()], False, id="unknown errors"),
    ],
)
def test_a_failure_is_repeated_if_the_same_error_comes_back_without_progress(
    history: list[AttemptEnd], is_repeated: bool
) -> None:
    assert repeats_failure(history) is is_repeated


def test_a_stuck_trial_is_told_where_it_is_stuck_and_what_to_do() -> None:
    why = decide([preempted(40)] * 6, 5).why
    assert why.startswith("5 attempts in a row ended (preempted) without a newer checkpoint than 40 batches")
    assert "min_checkpoint_period" in why


def too_short(cause: Cause = Cause.PREEMPTED, steps: int = 0) -> AttemptEnd:
    return AttemptEnd(cause=cause, steps=steps, too_short=True)


@pytest.mark.parametrize(
    ("history", "action"),
    [
        pytest.param([too_short()] * 20, Action.REQUEUE, id="none had the time to save"),
        pytest.param([too_short()] * 49, Action.REQUEUE, id="one less than ten times the limit"),
        pytest.param([too_short()] * 50, Action.GIVE_UP, id="ten times the limit"),
        pytest.param([too_short(), preempted()] * 4, Action.REQUEUE, id="four that had it"),
        pytest.param([*[too_short(), preempted()] * 5, too_short()], Action.GIVE_UP, id="five that had it"),
        pytest.param([*[too_short()] * 49, preempted(1), too_short(steps=1)], Action.REQUEUE, id="progress resets"),
        pytest.param(
            [*[preempted()] * 4, *[ended(Cause.DISK_FULL)] * 9], Action.RESTART, id="a full disk is not counted"
        ),
        pytest.param(
            [*[ended(Cause.DISK_FULL)] * 9, preempted()],
            Action.REQUEUE,
            id="full disks before a preemption are not counted",
        ),
    ],
)
def test_attempts_that_had_no_chance_are_counted_separately(history: list[AttemptEnd], action: Action) -> None:
    assert decide(history, 0).action is action


def test_the_limit_is_a_setting() -> None:
    assert decide([preempted()] * 2, 0, limit=2).action is Action.GIVE_UP
    assert decide([preempted()] * 9, 0, limit=10).action is Action.REQUEUE


def test_a_decision_says_what_happens_next() -> None:
    assert decide([preempted(3)], 0).why == "preempted"
    why = decide([preempted(), too_short(), preempted()], 0).why
    assert "2 of 5 attempts without progress; gives up after 3 more" in why
    assert "1 of 50 attempts" in why


ends = st.builds(
    AttemptEnd, cause=st.sampled_from([Cause.FAILED, *TRANSIENT]), steps=st.integers(0, 1000), user_error=st.booleans()
)


@given(st.lists(ends, min_size=1, max_size=40), st.integers(0, 6))
def test_no_trial_restarts_more_often_than_allowed(story: list[AttemptEnd], max_restarts: int) -> None:
    actions = []
    for attempts in range(1, len(story) + 1):
        actions.append(decide(story[:attempts], max_restarts).action)
        if actions[-1] in (Action.DONE, Action.GIVE_UP):
            break
    assert actions.count(Action.RESTART) <= max_restarts


@given(st.lists(st.tuples(st.sampled_from(TRANSIENT), st.integers(1, 100)), min_size=1, max_size=60), st.integers(0, 3))
def test_a_trial_that_gets_on_is_never_given_up(story: list[tuple[Cause, int]], max_restarts: int) -> None:
    history: list[AttemptEnd] = []
    steps = 0
    for cause, gain in story:
        steps += gain
        history.append(ended(cause, steps))
        assert decide(history, max_restarts).action is Action.REQUEUE


def test_a_log_policy_can_say_that_no_retry_helps() -> None:
    end = AttemptEnd(cause=Cause.FAILED, steps=0, log_policy="CUDA OOM")
    assert decide([end], 5) == Decision(Action.GIVE_UP, "the log policy 'CUDA OOM' cancels retries")
