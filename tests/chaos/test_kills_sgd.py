"""A TorchTrainer whose workers, node agent and driver are killed at random moments ends with the same bits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack

import pytest

from tests.chaos.kills import driver, orders
from tests.chaos.kills.plans import Kill
from tests.chaos.kills.sgd_plans import random_ones
from tests.chaos.kills.training import REPOSITORY, SITE, Place, place
from tests.chaos.table import Tally
from tests.wait import DEADLINE_S, wait_for

SEEDS = range(1, 6)


def run(its: Place, max_retries: int) -> tuple[int, list[str]]:
    """One start of the program: its exit code, and what it has said."""
    variables = {
        "PYTHONPATH": f"{REPOSITORY}:{SITE}",
        orders.FOLDER: str(its.kills),
        "TMPDIR": str(its.tmp),
    }
    program = [sys.executable, driver.__file__, str(max_retries)]
    log = its.root / "driver.log"
    with log.open("a") as errors:
        done = subprocess.run(
            program,
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            timeout=DEADLINE_S,
        )
    assert done.returncode in (0, -signal.SIGKILL), log.read_text()
    return done.returncode, [line for line in done.stdout.splitlines(keepends=True) if line.endswith("\n")]


def trained(its: Place, kills: Sequence[Kill]) -> tuple[int, list[str]]:
    """How often the program was killed, and what all its starts have said."""
    orders.write(its.kills, [kill.order for kill in kills])
    starts, said = 0, list[str]()
    while (ended := run(its, sum(kill.is_charged for kill in kills)))[0]:
        starts += 1
        said += ended[1]
        assert starts <= len(kills)
    return starts, said + ended[1]


@pytest.fixture(scope="module")
def undisturbed() -> list[str]:
    with place("scheduler: local\n") as its:
        starts, said = trained(its, [])
    assert (starts, len(said)) == (0, driver.EPOCHS + 2)
    return said


@pytest.mark.chaos
@pytest.mark.parametrize("seed", SEEDS)
def test_a_trainer_survives_what_is_killed(undisturbed: list[str], tally: Tally, seed: int) -> None:
    kills = random_ones(seed)
    with ExitStack() as all_of_them, place("scheduler: local\n") as its:
        for kill in kills:
            all_of_them.enter_context(tally.trying(f"TorchTrainer: {kill.what}"))
        starts, said = trained(its, kills)
        assert len(orders.done(its.kills)) == len(kills)
        assert starts == sum(kill.ends_job for kill in kills)
        assert set(said) == set(undisturbed)  # an epoch whose state was lost with all that held it is trained again
        assert said[-1] == undisturbed[-1]
        wait_for(lambda: not its.left(), DEADLINE_S, its.left)
        assert [path.name for path in its.tmp.iterdir() if not path.name.startswith("torchinductor_")] == []
