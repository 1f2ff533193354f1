"""Random schedules of preemptions: whatever was stopped, and wherever, ends with the bits of what was not."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.chaos.lives import Lived
from tests.chaos.schedules import schedule
from tests.chaos.table import Tally
from tests.e2e.conftest import _fork_server, warm

__all__ = ["_fork_server", "warm"]

EACH = 25
SAMPLE = (("pytorch", 0), ("sharded", 0))
EVERY = [(kind, seed) for kind in ("pytorch", "sharded", "deepspeed") for seed in range(EACH)]
CASES = [
    *(pytest.param(*case, id="sample-{}-{}".format(*case)) for case in SAMPLE),
    *(pytest.param(*case, id="{}-{}".format(*case), marks=pytest.mark.chaos) for case in EVERY),
]


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(("kind", "seed"), CASES)
def test_a_trial_that_is_preempted_at_random_has_the_bits_of_one_that_is_not(
    tally: Tally, kind: str, seed: int
) -> None:
    drawn = schedule(kind, seed)
    print(drawn)
    with tally.trying(f"preemptions of {kind} trials, to the bit"):
        undisturbed = Lived.begin(drawn, undisturbed=True)
        undisturbed.wait()
        assert undisturbed.story.causes == ["finished"], undisturbed.said
        stopped = Lived.begin(drawn, undisturbed=False)
        stopped.wait()
        *stops, end = stopped.story.causes
        assert end == "finished", stopped.said
        assert stops, stopped.said
        assert Counter(stops).keys() <= {"preempted", "resume check"}, stopped.said
        assert stopped.differences(undisturbed) == []
