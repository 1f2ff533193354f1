"""Kills in trainings on two nodes of a real Slurm: whatever is killed, a successor job continues."""

from __future__ import annotations

import pytest

from tests.chaos.kills.slurm_plans import one_of_each_kind
from tests.chaos.kills.training import check_survival
from tests.chaos.table import Tally
from tests.e2e.conftest import _fork_server, undisturbed, warm
from tests.e2e.story import DIRECT, Story
from tests.labs.slurm import SlurmLab

__all__ = ["_fork_server", "undisturbed", "warm"]

pytestmark = [pytest.mark.slurm, pytest.mark.chaos]

SLURM = """scheduler: slurm
slots_per_node: 1
max_nodes: 3
slot_type: cpu
resource_pool: low
signal_lead_s: 70
resume: successor
"""


@pytest.mark.parametrize("seed", range(2))
def test_a_gang_on_two_nodes_of_slurm_survives_what_is_killed(
    undisturbed: Story, slurm_lab: SlurmLab, monkeypatch: pytest.MonkeyPatch, tally: Tally, seed: int
) -> None:
    slurm_lab.use(monkeypatch)
    check_survival(SLURM, one_of_each_kind(seed), tally, undisturbed, DIRECT)
