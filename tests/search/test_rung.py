from __future__ import annotations

import math
import random

from hypothesis import given
from hypothesis import strategies as st

from hpc_det.search.asha import Rung

EVENTS = st.sampled_from(["settle", "pause", "pause", "unpause", "promote", "forget"])
VALUES = st.one_of(st.sampled_from([0.0, 1.0]), st.floats())


@given(st.lists(st.tuples(EVENTS, VALUES, st.integers(0, 99)), max_size=80), st.floats(1.1, 4))
def test_a_rung_ranks_as_a_plain_list_does(story: list[tuple[str, float, int]], divisor: float) -> None:
    """The model: [value, trial] in order of arrival, sorted anew at each question; Python's sort keeps that order."""
    rung, arrived, paused = Rung(1), dict[int, float](), set[int]()

    def ranked() -> list[int]:
        return sorted(arrived, key=lambda trial: (math.isnan(arrived[trial]), arrived[trial]))

    for trial, (event, value, nth) in enumerate(story, start=1):
        if event in ("settle", "pause"):
            arrived[trial] = value
            if event == "settle":
                settled = [other for other in ranked() if other not in paused]
                assert rung.settle(trial, value) == settled.index(trial)
            else:
                rung.pause(trial, value)
                paused.add(trial)
        elif event == "forget" and arrived:
            gone = sorted(arrived)[nth % len(arrived)]
            rung.forget(gone)
            paused.discard(gone)
            del arrived[gone]
        elif event == "unpause" and paused:
            settling = sorted(paused)[nth % len(paused)]
            rung.unpause(settling)
            paused.remove(settling)
        elif event == "promote" and (best := rung.promotable(divisor)):
            rung.unpause(best)
            paused.remove(best)
        share = int(len(arrived) / divisor)
        assert rung.share(divisor) == share
        assert rung.promotable(divisor) == next((other for other in ranked()[:share] if other in paused), None)


def test_promotions_stay_in_order_when_many_others_leave() -> None:
    rung, draws = Rung(1), random.Random(1)
    values = {trial: draws.random() for trial in range(1, 301)}
    for trial, value in values.items():
        rung.pause(trial, value)
    for trial in draws.sample(sorted(values), 100):
        rung.unpause(trial)
        del values[trial]
    for trial in sorted(values, key=lambda trial: values[trial]):
        assert rung.promotable(1) == trial
        rung.unpause(trial)


def test_forgetting_who_was_never_there_changes_nothing() -> None:
    rung = Rung(1)
    rung.settle(1, 0.0)
    rung.forget(2)
    assert rung.share(1) == 1
