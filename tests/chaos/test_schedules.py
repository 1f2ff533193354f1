"""Random schedules of preemptions: wherever a training was stopped, it ends bit-equal to one that was not."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.chaos.lives import TrainerRun, TrialRun
from tests.chaos.schedules import schedule, trainer_schedule
from tests.chaos.table import Tally
from tests.e2e.conftest import _fork_server, warm

__all__ = ["_fork_server", "warm"]

EACH = 25
SAMPLE = (("pytorch", 24), ("sharded", 12))
"""Schedules with few attempts, for `make test-long`."""
EVERY = [(kind, seed) for kind in ("pytorch", "sharded", "deepspeed") for seed in range(EACH)]
CASES = [
    *(pytest.param(*case, id="sample-{}-{}".format(*case), marks=pytest.mark.long) for case in SAMPLE),
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
        undisturbed = TrialRun.begin(drawn, undisturbed=True)
        undisturbed.wait()
        assert undisturbed.story.causes == ["finished"], undisturbed.logged
        stopped = TrialRun.begin(drawn, undisturbed=False)
        stopped.wait()
        *stops, end = stopped.story.causes
        assert end == "finished", stopped.logged
        assert stops, stopped.logged
        assert Counter(stops).keys() <= {"preempted", "resume check"}, stopped.logged
        preempted = {number for number, cause in enumerate(stops, 1) if cause == "preempted"}
        assert preempted <= stopped.attempts_with_signals, stopped.logged
        with tally.trying_each(f"stops of {kind} trials: {cause}" for cause in stops):
            assert stopped.differences(undisturbed) == []


SEEDS = [
    pytest.param(10, id="sample-trainer-10", marks=pytest.mark.long),
    *(pytest.param(seed, id=f"trainer-{seed}", marks=pytest.mark.chaos) for seed in range(EACH)),
]


@pytest.mark.usefixtures("_fork_server")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_torch_trainer_that_is_preempted_at_random_has_the_bits_of_one_that_is_not(
    tally: Tally, tmp_path: Path, seed: int
) -> None:
    drawn = trainer_schedule(seed)
    print(drawn)
    with tally.trying("preemptions of a TorchTrainer, to the bit"):
        undisturbed = TrainerRun.to_its_end(tmp_path / "undisturbed", drawn, undisturbed=True)
        assert undisturbed.codes == (0,)
        stopped = TrainerRun.to_its_end(tmp_path / "stopped", drawn, undisturbed=False)
        assert len(stopped.codes) > 1
        assert stopped.differences(undisturbed) == []
