"""Time lines of handwritten histories with known numbers, in seconds since the epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from hpc_det.report.spans import Phase, Span, TrialTimes, goodput, seconds_by_phase, spans_of
from hpc_det.view.metric_history import MetricHistory
from hpc_det.view.trial_history import AttemptHistory
from tests.checkpoint.saved import save


def attempt(number: int, started: float, ended: float | None = None, **end: Any) -> AttemptHistory:
    return AttemptHistory(number=number, job_id="7", worker=0, host="node1", started=started, ended=ended, **end)


def begins(attempt: int, time: float, trained: int = 0) -> dict[str, Any]:
    return {"kind": "begins", "attempt": attempt, "trained": trained, "validated": trained, "time": time}


def trained(attempt: int, time: float, steps: int) -> dict[str, Any]:
    return {"kind": "training", "attempt": attempt, "steps": steps, "metrics": {}, "time": time}


def validated(attempt: int, time: float, steps: int, seconds: float) -> dict[str, Any]:
    return {"kind": "validation", "attempt": attempt, "steps": steps, "metrics": {}, "time": time, "seconds": seconds}


def phases(trial: TrialTimes) -> list[tuple[str, float, float]]:
    return [(span.phase.value, span.begin, span.end) for span in spans_of(trial)]


def trial(
    attempts: Sequence[AttemptHistory], lines: Sequence[dict[str, Any]] = (), *, is_over: bool = True, **known: Any
) -> TrialTimes:
    return TrialTimes(
        attempts=attempts, lines=MetricHistory(lines).attempts, **{"saves": [], "now": 1000.0, **known}, is_over=is_over
    )


FINISHED = {"cause": "finished", "action": "done"}


def test_an_undisturbed_trial_waits_starts_trains_validates_saves_and_ends() -> None:
    undisturbed = trial(
        [attempt(1, 100, 200, batches=50, **FINISHED)],
        [begins(1, 110), trained(1, 150, 25), validated(1, 155, 25, seconds=5), trained(1, 190, 50)],
        saves=[save(2, 3, batches=25, began=155), save(2, 4, batches=50, began=190)],
        queued=[40.0],
    )
    assert phases(undisturbed) == [
        ("queued", 40, 100),
        ("starting", 100, 110),
        ("training", 110, 150),
        ("validating", 150, 155),
        ("saving", 155, 158),
        ("training", 158, 190),
        ("saving", 190, 194),
        ("ending", 194, 200),
    ]
    assert goodput(seconds_by_phase(spans_of(undisturbed))) == pytest.approx((40 + 32) / 100)


def test_what_was_trained_after_the_last_save_before_a_failure_is_lost() -> None:
    failed = trial(
        [
            attempt(1, 0, 100, batches=20, cause="failed", action="restart"),
            attempt(2, 105, 200, batches=50, **FINISHED),
        ],
        [begins(1, 10), trained(1, 50, 20), trained(1, 90, 40), begins(2, 115, trained=20), trained(2, 190, 50)],
        saves=[save(2, 2, batches=20, began=50), save(2, 2, batches=50, began=198)],
    )
    assert phases(failed) == [
        ("starting", 0, 10),
        ("training", 10, 50),
        ("saving", 50, 52),
        ("lost", 52, 100),
        ("starting", 100, 105),  # the slots are kept for the next attempt
        ("starting", 105, 115),
        ("training", 115, 198),
        ("saving", 198, 200),
    ]
    assert goodput(seconds_by_phase(spans_of(failed))) == pytest.approx((40 + 83) / 200)


def test_without_a_save_all_of_an_attempt_is_lost() -> None:
    lost = trial([attempt(1, 0, 50, batches=0, cause="failed", action="give up")], [begins(1, 10), trained(1, 40, 5)])
    assert phases(lost) == [("starting", 0, 10), ("lost", 10, 50)]
    assert goodput(seconds_by_phase(spans_of(lost))) == 0


def test_a_preempted_trial_is_back_in_the_queue_and_has_no_slots_there() -> None:
    preempted = trial(
        [
            attempt(1, 0, 60, batches=20, cause="preempted", action="requeue"),
            attempt(2, 300, 400, batches=50, **FINISHED),
        ],
        [begins(1, 10), trained(1, 50, 20), begins(2, 310, trained=20), trained(2, 398, 50)],
        saves=[save(5, 5, batches=20, began=50), save(2, 2, batches=50, began=398)],
    )
    assert phases(preempted) == [
        ("starting", 0, 10),
        ("training", 10, 50),
        ("saving", 50, 55),
        ("ending", 55, 60),
        ("queued", 60, 300),
        ("starting", 300, 310),
        ("training", 310, 398),
        ("saving", 398, 400),
    ]
    assert goodput(seconds_by_phase(spans_of(preempted))) == pytest.approx((40 + 88) / 160)


def test_a_preemption_that_left_no_time_for_a_save_loses_what_was_reported_since() -> None:
    torn = trial(
        [attempt(1, 0, 60, batches=20, cause="preempted", action="requeue")],
        [begins(1, 10), trained(1, 30, 20), trained(1, 55, 40)],
        saves=[save(1, 1, batches=20, began=30)],
    )
    assert phases(torn)[-1] == ("lost", 31, 60)


def test_an_attempt_whose_end_a_later_start_wrote_ended_with_its_last_sign_of_life() -> None:
    silent = trial(
        [
            attempt(1, 0, 500, batches=20, cause="node lost", action="requeue", late=True),
            attempt(2, 500, 600, batches=50, **FINISHED),
        ],
        [begins(1, 10), trained(1, 30, 20), trained(1, 80, 40), begins(2, 510, trained=20)],
        saves=[save(1, 1, batches=20, began=30), save(2, 2, batches=50, began=598)],
    )
    assert phases(silent)[:5] == [
        ("starting", 0, 10),
        ("training", 10, 30),
        ("saving", 30, 31),
        ("lost", 31, 80),
        ("queued", 80, 500),
    ]


def test_a_trial_waits_for_the_search_and_is_paused_until_jobs_are_submitted_again() -> None:
    first, second = save(2, 2, batches=20, began=48), save(2, 2, batches=30, began=148)
    between = trial(
        [
            attempt(1, 0, 50, batches=20, cause="waiting", action="wait"),
            attempt(2, 100, 150, batches=30, cause="paused", action="pause"),
            attempt(3, 400, 450, batches=40, **FINISHED),
        ],
        [begins(1, 10), begins(2, 110, trained=20), begins(3, 410, trained=30)],
        saves=[first, second, save(2, 2, batches=40, began=448)],
        queued=[350.0],
    )
    found = phases(between)
    assert ("waiting", 50, 100) in found
    assert ("paused", 150, 350) in found
    assert ("queued", 350, 400) in found


def test_an_attempt_that_goes_on_has_lost_nothing_so_far() -> None:
    running = trial([attempt(1, 900)], [begins(1, 910)], saves=[save(5, 5, batches=9, began=950)], is_over=False)
    assert phases(running) == [
        ("starting", 900, 910),
        ("training", 910, 950),
        ("saving", 950, 955),
        ("training", 955, 1000),
    ]


def test_what_comes_after_the_last_attempt_goes_on_until_now() -> None:
    requeued = [attempt(1, 0, 60, batches=0, cause="preempted", action="requeue")]
    assert phases(trial(requeued, [begins(1, 10)], is_over=False))[-1] == ("queued", 60, 1000)
    assert phases(trial(requeued, [begins(1, 10)]))[-1] == ("ending", 10, 60)


def test_a_program_that_does_not_say_when_it_trains_has_no_goodput() -> None:
    script = trial([attempt(1, 0, 60, batches=0, **FINISHED)])
    assert phases(script) == [("unknown", 0, 60)]
    assert goodput(seconds_by_phase(spans_of(script))) is None


def test_a_trial_that_had_no_slots_has_no_goodput() -> None:
    assert goodput(seconds_by_phase([Span(Phase.QUEUED, 0, 10)])) is None
