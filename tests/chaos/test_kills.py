"""Processes of real trainings on this machine are killed at random moments; the result is bit-equal."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.chaos.kills import plans
from tests.chaos.kills.plans import Kill, of_each_seed
from tests.chaos.kills.training import check_survival
from tests.chaos.table import Tally
from tests.e2e.conftest import _fork_server, undisturbed, warm
from tests.e2e.resume_cases import Training
from tests.e2e.story import WARM, Story

__all__ = ["_fork_server", "undisturbed", "warm"]

LOCAL = "scheduler: local\nslots_per_node: 2\nmax_nodes: 1\nslot_type: cpu\n"
SEEDS: dict[Callable[[int], list[Kill]], int] = {
    plans.one_after_the_other: 12,
    plans.before_ranks_start: 4,
    plans.twice_in_a_row: 6,
    plans.at_the_end: 6,
    plans.asked_and_killed: 6,
}
"""Number of seeds of each plan."""


@pytest.mark.long
def test_a_training_survives_a_kill_and_one_of_the_job_that_handles_it(undisturbed: Story, tally: Tally) -> None:
    check_survival(LOCAL, plans.twice_in_a_row(0)[:2], tally, undisturbed, WARM)


@pytest.mark.chaos
@pytest.mark.parametrize(("plan", "seed"), of_each_seed(SEEDS))
def test_a_training_survives_what_is_killed(
    undisturbed: Story, tally: Tally, plan: Callable[[int], list[Kill]], seed: int
) -> None:
    check_survival(LOCAL, plan(seed), tally, undisturbed, WARM)


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("launcher", ["direct", "torch_distributed", "mpich", "open_mpi", "deepspeed"])
def test_a_training_under_each_launcher_survives_what_is_killed(
    undisturbed: Story, tally: Tally, launcher: str, seed: int
) -> None:
    training = Training("trial", launcher)
    profile = f"{LOCAL}mpi_launcher: [{training.mpi_launcher()}]\n"
    check_survival(profile, plans.of_launchers(seed), tally, undisturbed, training.entrypoint)
