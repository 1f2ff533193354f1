"""A TorchTrainer whose workers, node agent and driver are killed at random moments ends bit-equal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.chaos.kills import driver, orders
from tests.chaos.kills.plans import Kill
from tests.chaos.kills.sgd_plans import random_ones
from tests.chaos.kills.training import INJECT, REPOSITORY, Sandbox, sandbox
from tests.chaos.table import Tally
from tests.wait import DEADLINE_S, wait_for

SEEDS = range(6)


def run(made: Sandbox, max_retries: int) -> tuple[int, list[str]]:
    """Start the program once; return its exit code and its complete output lines."""
    variables = {
        "PYTHONPATH": f"{REPOSITORY}:{INJECT}",
        orders.FOLDER: str(made.kills),
        "TMPDIR": str(made.tmp),
    }
    program = [sys.executable, driver.__file__, str(max_retries)]
    log = made.root / "driver.log"
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


def trained(made: Sandbox, kills: Sequence[Kill]) -> tuple[int, list[str]]:
    """Return how often the program was killed, and the output lines of all its starts."""
    orders.write(made.kills, [kill.order for kill in kills])
    starts, lines = 0, list[str]()
    while (ended := run(made, sum(not kill.ends_job for kill in kills)))[0]:
        starts += 1
        lines += ended[1]
        assert starts <= len(kills)
    return starts, lines + ended[1]


@pytest.fixture(scope="module")
def undisturbed() -> list[str]:
    with sandbox("scheduler: local\n") as made:
        starts, lines = trained(made, [])
    assert (starts, len(lines)) == (0, driver.EPOCHS + 2)
    return lines


@pytest.mark.chaos
@pytest.mark.parametrize("seed", SEEDS)
def test_a_trainer_survives_what_is_killed(undisturbed: list[str], tally: Tally, seed: int) -> None:
    kills = random_ones(seed)
    tried = (f"TorchTrainer: {kill.what}" for kill in kills)
    with tally.trying_each(tried), sandbox("scheduler: local\n") as made:
        starts, lines = trained(made, kills)
        assert len(orders.done(made.kills)) == len(kills)
        assert starts == sum(kill.ends_job for kill in kills)
        assert set(lines) == set(undisturbed)  # an epoch is repeated if all processes with its state were killed
        assert lines[-1] == undisturbed[-1]
        wait_for(lambda: not made.left(), DEADLINE_S, made.left)
        assert [path.name for path in made.tmp.iterdir() if not path.name.startswith("torchinductor_")] == []
