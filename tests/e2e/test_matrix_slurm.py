"""Launchers x what can stop a gang on Slurm: two ranks on two nodes come back, and nobody sees it in their numbers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import pytest

from hpc_det.node.files import read_json
from tests.e2e import test_slurm
from tests.e2e.matrix import ANYWHERE, LAUNCHERS, Launcher, Trouble, cells, told
from tests.e2e.story import Story
from tests.labs.slurm import SlurmLab
from tests.machine import slowness

pytestmark = pytest.mark.slurm

HERE = {**LAUNCHERS, "srun": Launcher("srun"), "mpich_by_srun": Launcher("mpi", lambda: "srun, --mpi=pmi2")}
PROFILE = """
name: lab
scheduler: slurm
slots_per_node: 1
max_nodes: 3
slot_type: cpu
resource_pool: low
signal_lead_s: 70
resume: {way_back}
mpi_launcher: [{mpi_launcher}]
"""
LONGEST_GAP_S = 6
"""From the moment when nodes are free to the start of a successor: one round of this lab's scheduler, which takes 2 s,
and twice as much for its steps. It is longer on a machine that is slow. A requeued job would wait for 121 s, or 3 s and
a release.
"""


@pytest.fixture
def profile(slurm_lab: SlurmLab, state_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Writes the profile `lab` for a launcher and a way back."""

    def write(launcher: str, way_back: str) -> None:
        text = PROFILE.format(way_back=way_back, mpi_launcher=HERE[launcher].starts_ranks())
        test_slurm.use(slurm_lab, monkeypatch, text)

    return write


def preempted(lab: SlurmLab, story: Story) -> None:
    lab.preempt(3, seconds=0)


def out_of_time(lab: SlurmLab, story: Story) -> None:
    """Slurm looks at limits every 30 s."""
    lab.run("scontrol", "update", f"JobId={story.job_id}", "TimeLimit=1")


def node_lost(lab: SlurmLab, story: Story) -> None:
    """The second one, and at once there is another."""
    name = (read_json(story.trial.nodes(1)) or [])[1]
    lab.run("scontrol", "update", f"NodeName={name}", "State=DOWN", "Reason=lost")
    with suppress(RuntimeError):  # it may be back already
        lab.run("scontrol", "update", f"NodeName={name}", "State=RESUME")


TROUBLES: dict[str, Trouble[SlurmLab]] = {
    "preempted": Trouble(preempted, ("preempted", "finished")),
    "time_limit": Trouble(out_of_time, ("time limit", "finished")),
    "node_lost": Trouble(node_lost, ("node lost", "finished")),
    **ANYWHERE,
}


@pytest.mark.parametrize(("launcher", "trouble"), cells(HERE, TROUBLES, [("direct", "preempted")]))
def test_a_run_with_trouble_ends_to_the_last_bit_as_the_one_without(
    undisturbed: Story, slurm_lab: SlurmLab, profile: Callable[[str, str], None], launcher: str, trouble: str
) -> None:
    profile(launcher, "successor")
    story = told(slurm_lab, HERE[launcher], TROUBLES[trouble])
    assert story.same_as(undisturbed)
    if trouble == "preempted":
        assert gap_s(slurm_lab, story) <= LONGEST_GAP_S * slowness()


def gap_s(lab: SlurmLab, story: Story) -> float:
    """From the end of the job that had preempted the first one to the start of the second."""
    first, second = (lab.job(attempt["job_id"]) for attempt in story.describe()["attempts"])
    assert int(second["JobId"]) == int(first["JobId"]) + 1  # submitted when the first one began
    preempter = lab.job(int(second["JobId"]) + 1)
    gap = datetime.fromisoformat(second["StartTime"]) - datetime.fromisoformat(preempter["EndTime"])
    print(f"the successor started {gap.total_seconds():.0f} s after the nodes were free")
    return gap.total_seconds()


# Slurm has put the job back by the time it is asked, and shows no more why.
NODE_LOST_AND_REQUEUED = Trouble(node_lost, ("preempted", "finished"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("way_back", "trouble"),
    [
        ("requeue", TROUBLES["preempted"]),
        ("requeue", NODE_LOST_AND_REQUEUED),
        ("resubmit", TROUBLES["preempted"]),
        ("resubmit", TROUBLES["time_limit"]),
    ],
)
def test_each_way_back_into_the_queue_leads_to_the_same_end(
    undisturbed: Story,
    slurm_lab: SlurmLab,
    profile: Callable[[str, str], None],
    way_back: str,
    trouble: Trouble[SlurmLab],
) -> None:
    profile("direct", way_back)
    assert told(slurm_lab, HERE["direct"], trouble).same_as(undisturbed)
