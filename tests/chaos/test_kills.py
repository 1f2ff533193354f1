"""Processes of real trainings on this machine are killed at random moments: nobody sees it in what was trained."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.chaos.kills import plans
from tests.chaos.kills.plans import Kill
from tests.chaos.kills.training import survives
from tests.chaos.table import Tally
from tests.e2e.conftest import _fork_server, undisturbed, warm
from tests.e2e.matrix import LAUNCHERS
from tests.e2e.story import WARM, Story

__all__ = ["_fork_server", "undisturbed", "warm"]

LOCAL = "scheduler: local\nslots_per_node: 2\nmax_nodes: 1\nslot_type: cpu\n"
PLANS: dict[Callable[[int], list[Kill]], int] = {
    plans.one_after_the_other: 12,
    plans.before_ranks_start: 4,
    plans.twice_in_a_row: 6,
    plans.at_the_end: 6,
    plans.told_and_killed: 6,
}
"""How many of each."""


def test_a_training_survives_a_kill_and_one_of_the_job_that_sees_to_it(undisturbed: Story, tally: Tally) -> None:
    survives(LOCAL, plans.twice_in_a_row(0)[:2], tally, undisturbed, WARM)


@pytest.mark.chaos
@pytest.mark.parametrize("plan", PLANS)
def test_a_training_survives_what_is_killed(
    undisturbed: Story, tally: Tally, plan: Callable[[int], list[Kill]]
) -> None:
    for seed in range(PLANS[plan]):
        survives(LOCAL, plan(seed), tally, undisturbed, WARM)


@pytest.mark.chaos
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_so_it_does_under_each_launcher(undisturbed: Story, tally: Tally, launcher: str) -> None:
    found = LAUNCHERS[launcher]
    profile = f"{LOCAL}mpi_launcher: [{found.starts_ranks()}]\n"
    for seed in range(2):
        survives(profile, plans.of_launchers(seed), tally, undisturbed, found.entrypoint)
