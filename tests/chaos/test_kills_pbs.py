"""Kills in trainings on two nodes of PBS: whatever is killed, the job resumes automatically."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.chaos.kills import pbs_plans as plans
from tests.chaos.kills.plans import Kill, of_each_seed
from tests.chaos.kills.training import check_survival
from tests.chaos.table import Tally
from tests.e2e.conftest import _fork_server, undisturbed, warm
from tests.e2e.story import DIRECT, Story
from tests.labs.pbs_lab import PbsLab

__all__ = ["_fork_server", "undisturbed", "warm"]

PBS = "scheduler: pbs\nslots_per_node: 1\nmax_nodes: 3\nslot_type: cpu\nresource_pool: low\n"
SEEDS: dict[Callable[[int], list[Kill]], int] = {
    plans.one_after_the_other: 5,
    plans.twice_in_a_row: 3,
}
"""Number of seeds of each plan."""


@pytest.mark.chaos
@pytest.mark.parametrize(("plan", "seed"), of_each_seed(SEEDS))
def test_a_gang_on_two_nodes_survives_what_is_killed(
    undisturbed: Story, pbs_lab: PbsLab, tally: Tally, plan: Callable[[int], list[Kill]], seed: int
) -> None:
    pbs_lab.set_kill_delay("low", 30)  # the machine may be slow
    check_survival(PBS, plan(seed), tally, undisturbed, DIRECT)
