"""Launchers x what can stop a gang on PBS: two ranks on two nodes come back, and nobody sees it in their numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import hpc_det as package
from tests.e2e.matrix import ANYWHERE, LAUNCHERS, Trouble, cells, told
from tests.e2e.story import WAITS_AT, Story
from tests.labs.pbs_lab import PbsLab

PROFILE = """
name: lab
scheduler: pbs
slots_per_node: 1
max_nodes: 3
slot_type: cpu
resource_pool: low
setup: ["export PYTHONPATH={repository}"]
resume: {way_back}
mpi_launcher: [{mpi_launcher}]
"""


@pytest.fixture
def profile(pbs_lab: PbsLab, state_folder: Path) -> Callable[[str, str], None]:
    """Writes the profile `lab` for a launcher and a way back."""
    pbs_lab.set_kill_delay("low", 30)  # the machine may be slow
    path = state_folder / "conf" / "cluster" / "lab.yaml"
    path.parent.mkdir(parents=True)

    def write(launcher: str, way_back: str) -> None:
        mpi_launcher = LAUNCHERS[launcher].starts_ranks()
        repository = Path(package.__file__).parents[1]
        path.write_text(PROFILE.format(repository=repository, way_back=way_back, mpi_launcher=mpi_launcher))

    return write


def preempted_in_order(letter: str) -> Callable[[PbsLab, Story], None]:
    def comes(lab: PbsLab, story: Story) -> None:
        lab.set_preempt_order(letter)
        lab.preempt(3)

    return comes


def out_of_time(lab: PbsLab, story: Story) -> None:
    lab.run("qalter", "-l", "walltime=1", story.job_id)


def node_lost(number: int) -> Callable[[PbsLab, Story], None]:
    def comes(lab: PbsLab, story: Story) -> None:
        lab.fail_node(lab.nodes[number])

    return comes


TROUBLES: dict[str, Trouble[PbsLab]] = {
    "requeued": Trouble(preempted_in_order("R"), ("preempted", "finished")),
    "deleted": Trouble(preempted_in_order("D"), ("preempted", "finished")),
    "suspended": Trouble(preempted_in_order("S"), ("finished",), (WAITS_AT.format(-1), "hyperparameters.batch_s=0.3")),
    "walltime": Trouble(out_of_time, ("time limit", "finished")),
    "first_node_lost": Trouble(node_lost(0), ("node lost", "finished")),
    "other_node_lost": Trouble(node_lost(1), ("node lost", "finished")),
    **ANYWHERE,
}
TAKE_ANOTHER_JOB = ["deleted", "walltime", "pause"]
IN_A_HURRY = [("direct", "requeued"), ("mpich", "deleted")]


@pytest.mark.parametrize(("launcher", "trouble"), cells(LAUNCHERS, TROUBLES, IN_A_HURRY))
def test_a_run_with_trouble_ends_to_the_last_bit_as_the_one_without(
    undisturbed: Story, pbs_lab: PbsLab, profile: Callable[[str, str], None], launcher: str, trouble: str
) -> None:
    profile(launcher, "successor")
    story = told(pbs_lab, LAUNCHERS[launcher], TROUBLES[trouble])
    assert story.same_as(undisturbed)
    jobs = {attempt["job_id"] for attempt in story.describe()["attempts"]}
    assert len(jobs) == (2 if trouble in TAKE_ANOTHER_JOB else 1)


@pytest.mark.long
@pytest.mark.parametrize("trouble", ["requeued", "deleted", "walltime", "pause"])
@pytest.mark.parametrize("way_back", ["resubmit", "chain"])
def test_each_way_back_into_the_queue_leads_to_the_same_end(
    undisturbed: Story, pbs_lab: PbsLab, profile: Callable[[str, str], None], way_back: str, trouble: str
) -> None:
    profile("direct", way_back)
    assert told(pbs_lab, LAUNCHERS["direct"], TROUBLES[trouble]).same_as(undisturbed)


@pytest.mark.long
@pytest.mark.parametrize("pbs_lab", [{"sister_lost_s": 360}], indirect=True)
def test_a_lost_node_is_left_minutes_before_pbs_notices_and_nobody_is_charged(
    undisturbed: Story, pbs_lab: PbsLab, profile: Callable[[str, str], None]
) -> None:
    profile("direct", "successor")
    trouble = Trouble(node_lost(1), ("node lost", "finished"), ("max_restarts=0",))
    assert told(pbs_lab, LAUNCHERS["direct"], trouble).same_as(undisturbed)
