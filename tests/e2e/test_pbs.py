"""Whole lives of jobs on PBS: gangs, arrays, shared nodes, a deletion. What may stop a gang: test_matrix_pbs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import hpc_det as package
from hpc_det.checkpoint.committed import newest_steps
from tests.e2e.story import Story, hpc_det
from tests.lab.pbs_lab import PbsLab

TWO_SLOTS = "resources.slots_per_trial=2"
PACED = "hyperparameters.batch_s=0.1"
PROFILE = """
name: lab
scheduler: pbs
slots_per_node: 1
max_nodes: 3
slot_type: gpu
resource_pool: low
setup: ["export PYTHONPATH={repository}"]
start_agents_with: {starter}
"""


@pytest.fixture(autouse=True)
def profile(pbs_lab: PbsLab, state_folder: Path) -> Callable[[str], None]:
    """Writes the profile `lab` with this way to start agents; with pbsdsh it is there."""
    folder = state_folder / "conf" / "cluster"
    folder.mkdir(parents=True)
    pbs_lab.set_kill_delay("low", 30)  # the machine may be slow

    def write(starter: str) -> None:
        text = PROFILE.format(repository=Path(package.__file__).parents[1], starter=starter)
        (folder / "lab.yaml").write_text(text)

    write("pbsdsh")
    return write


@pytest.mark.parametrize("starter", ["pbsdsh", pytest.param("pbs_tmrsh", marks=pytest.mark.long)])
def test_a_gang_on_two_nodes_trains_to_its_end(
    undisturbed: Story, pbs_lab: PbsLab, profile: Callable[[str], None], starter: str
) -> None:
    profile(starter)
    story = Story.begin(TWO_SLOTS, cluster="lab")
    story.wait()
    assert story.causes == ["finished"]
    assert story.same_as(undisturbed)
    job = pbs_lab.wait_for(story.job_id, "F")
    assert (job["Exit_status"], job["exec_host"]) == (0, f"{pbs_lab.nodes[0]}/0+{pbs_lab.nodes[1]}/0")
    assert not list(story.trial.experiment().jobs.glob(".nodes-*"))


@pytest.mark.long
def test_a_job_that_its_user_deletes_has_saved_and_does_not_come_back(pbs_lab: PbsLab) -> None:
    story = Story.begin(TWO_SLOTS, PACED, cluster="lab")
    story.until_batch(3)
    pbs_lab.run("qdel", story.job_id)
    story.wait(check=False)
    assert story.causes == ["cancelled"]
    assert newest_steps(story.trial.checkpoints) >= 3  # min_checkpoint_period is 8
    assert story.describe()["state"] == "CANCELED"
    assert pbs_lab.run("qselect") == ""


@pytest.mark.long
def test_the_trials_of_a_search_are_elements_of_an_array(pbs_lab: PbsLab) -> None:
    story = Story.begin(
        "searcher.name=random", "searcher.max_trials=2", "searcher.max_length={batches: 2}", cluster="lab"
    )
    story.wait()
    assert pbs_lab.job(story.job_id)["array_indices_submitted"] == "0-1"
    folder = story.trial.experiment()
    assert [len(trial.journal.read_text()) > 0 for trial in folder.trials()] == [True, True]
    assert {path.name for path in folder.jobs.glob("1*.log")} >= {"1-0.log", "1-1.log"}
    assert "COMPLETED" in hpc_det("experiment", "list").stdout


@pytest.mark.long
def test_gangs_share_the_nodes_of_one_job(pbs_lab: PbsLab) -> None:
    story = Story.begin(
        "resources.packed_slots=2",
        "searcher.name=random",
        "searcher.max_trials=2",
        "searcher.max_length={batches: 2}",
        cluster="lab",
    )
    story.wait()
    assert pbs_lab.job(story.job_id)["Resource_List"]["nodect"] == 2
    trials = story.trial.experiment().trials()
    assert [Story(story.number, trial).causes for trial in trials] == [["finished"]] * 2
