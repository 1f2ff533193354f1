"""Whole lives of gang jobs on PBS: two ranks on two nodes, preempted, deleted, out of time, killed, still bit-equal."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import hpc_det as package
from hpc_det.checkpoint.committed import newest_steps
from hpc_det.node.process import is_stopped
from hpc_det.store.journal import Journal
from tests.e2e.story import DIRECT, WAITS_AT, Story, hpc_det
from tests.labs.pbs_lab import PbsLab

TWO_SLOTS = "resources.slots_per_trial=2"
PROFILE = """
name: lab
scheduler: pbs
slots_per_node: 1
max_nodes: 3
slot_type: cpu
resource_pool: {queue}
setup: ["export PYTHONPATH={repository}"]
start_agents_with: {starter}
"""


@pytest.fixture(autouse=True)
def profile(any_pbs: PbsLab, state_folder: Path) -> Callable[[str], None]:
    """Return a function that writes the profile `lab` with this way to start agents; the profile with pbsdsh exists
    already.
    """
    folder = state_folder / "conf" / "cluster"
    folder.mkdir(parents=True)
    any_pbs.set_kill_delay("low", 30)  # the machine may be slow
    site = {"queue": any_pbs.queue or "null"}

    def write(starter: str) -> None:
        text = PROFILE.format(repository=Path(package.__file__).parents[1], starter=starter, **site)
        (folder / "lab.yaml").write_text(text)

    write("pbsdsh")
    return write


@pytest.mark.long
@pytest.mark.parametrize("starter", ["pbsdsh", "pbs_tmrsh"])
def test_a_gang_on_two_nodes_trains_to_its_end(
    undisturbed: Story, any_pbs: PbsLab, profile: Callable[[str], None], starter: str
) -> None:
    profile(starter)
    story = Story.begin(TWO_SLOTS, cluster="lab")
    story.wait()
    assert story.causes == ["finished"]
    assert story.same_as(undisturbed)
    job = any_pbs.wait_for(story.job_id, "F")
    hosts = {chunk.partition("/")[0] for chunk in job["exec_host"].split("+")}
    assert (job["Exit_status"], len(hosts)) == (0, 2)
    assert not list(story.trial.experiment().jobs.glob(".nodes-*"))


@pytest.mark.long
def test_a_gang_that_pbs_requeues_goes_on_bit_for_bit(undisturbed: Story, any_pbs: PbsLab) -> None:
    story = Story.begin(TWO_SLOTS, WAITS_AT.format(13), cluster="lab")
    story.until_batch(13)
    any_pbs.preempt(3)
    story.wait()
    assert story.causes == ["preempted", "finished"]
    assert any_pbs.job(story.job_id)["run_count"] == 2
    assert story.same_as(undisturbed)


def suspended_for_a_while(lab: PbsLab, slots: int) -> Story:
    story = Story.begin(f"resources.slots_per_trial={slots}", DIRECT, "hyperparameters.batch_s=0.2", cluster="lab")
    story.until_batch(3)
    ranks = [story.rank_pid(rank) for rank in range(slots)]
    lab.run("qsig", "-s", "suspend", story.job_id, manager=True)
    story.until(lambda: all(map(is_stopped, ranks)))
    assert story.describe()["state"] == "SUSPENDED"
    batches = story.batches_reported
    lab.run("qsig", "-s", "resume", story.job_id, manager=True)
    story.until(lambda: not any(map(is_stopped, ranks)))
    assert story.batches_reported <= batches + 1
    story.wait()
    assert story.causes == ["finished"]
    return story


@pytest.mark.long
def test_a_suspended_gang_stops_on_all_nodes_and_goes_on_bit_for_bit(undisturbed: Story, any_pbs: PbsLab) -> None:
    assert suspended_for_a_while(any_pbs, slots=2).same_as(undisturbed)


@pytest.mark.long
def test_a_suspended_agent_below_its_job_stops_its_ranks_too(undisturbed_alone: Story, any_pbs: PbsLab) -> None:
    """The agent's ranks are in a session that PBS does not know."""
    assert suspended_for_a_while(any_pbs, slots=1).same_as(undisturbed_alone)


def deleted_by_the_scheduler(lab: PbsLab, job_id: str) -> None:
    lab.set_preempt_order("D")
    lab.preempt(3)


def out_of_time(lab: PbsLab, job_id: str) -> None:
    lab.run("qalter", "-l", "walltime=1", job_id)


@pytest.mark.long
@pytest.mark.parametrize(("end", "cause"), [(deleted_by_the_scheduler, "preempted"), (out_of_time, "time limit")])
def test_a_job_that_pbs_ends_for_good_has_a_successor_that_goes_on_bit_for_bit(
    undisturbed: Story, any_pbs: PbsLab, end: Callable[[PbsLab, str], None], cause: str
) -> None:
    requests = ("resources.account=bio", "resources.memory_per_slot=64M", "resources.constraint=arch=linux")
    story = Story.begin(TWO_SLOTS, WAITS_AT.format(3), *requests, cluster="lab")
    story.until_batch(3)
    end(any_pbs, story.job_id)
    story.wait()
    assert story.causes == [cause, "finished"]
    assert any_pbs.job(story.job_id)["job_state"] in "EF"
    assert story.same_as(undisturbed)
    started = [event for event in Journal(story.trial.journal).events() if event["event"] == "started"]
    jobs = [any_pbs.job(event["job_id"]) for event in started]
    assert len(jobs) == 2
    assert {(job["Account_Name"], job["Resource_List"]["select"]) for job in jobs} == {
        ("bio", "2:ncpus=1:mpiprocs=1:ompthreads=1:mem=64mb:arch=linux")
    }


@pytest.mark.long
def test_a_job_that_its_user_deletes_has_saved_and_does_not_come_back(any_pbs: PbsLab) -> None:
    story = Story.begin(TWO_SLOTS, WAITS_AT.format(3), cluster="lab")
    story.until_batch(3)
    any_pbs.run("qdel", story.job_id)
    story.wait(check=False)
    assert story.causes == ["cancelled"]
    assert newest_steps(story.trial.checkpoints) >= 3  # min_checkpoint_period is 8
    assert story.describe()["state"] == "CANCELED"
    name = any_pbs.job(story.job_id)["Job_Name"]
    story.until(lambda: not any_pbs.run("qselect", "-N", name))


@pytest.mark.long
def test_a_rank_killed_on_the_other_node_restarts_the_gang_in_the_same_job(undisturbed: Story, pbs_lab: PbsLab) -> None:
    story = Story.begin(TWO_SLOTS, WAITS_AT.format(10), "max_restarts=1", cluster="lab")
    story.until_batch(10)
    os.kill(story.rank_pid(1), signal.SIGKILL)
    story.wait()
    assert story.causes == ["failed", "finished"]
    assert pbs_lab.job(story.job_id)["run_count"] == 1
    assert story.same_as(undisturbed)


@pytest.mark.long
def test_the_trials_of_a_search_are_elements_of_an_array(any_pbs: PbsLab) -> None:
    story = Story.begin(
        "searcher.name=random", "searcher.max_trials=2", "searcher.max_length={batches: 2}", cluster="lab"
    )
    story.wait()
    assert any_pbs.job(story.job_id)["array_indices_submitted"] == "0-1"
    folder = story.trial.experiment()
    assert [len(trial.journal.read_text()) > 0 for trial in folder.trials()] == [True, True]
    assert {path.name for path in folder.jobs.glob("1*.log")} >= {"1-0.log", "1-1.log"}
    assert "COMPLETED" in hpc_det("experiment", "list").stdout


@pytest.mark.long
def test_gangs_share_the_nodes_of_one_job(any_pbs: PbsLab) -> None:
    story = Story.begin(
        "resources.packed_slots=2",
        "searcher.name=random",
        "searcher.max_trials=2",
        "searcher.max_length={batches: 2}",
        cluster="lab",
    )
    story.wait()
    assert any_pbs.job(story.job_id)["Resource_List"]["nodect"] == 2
    trials = story.trial.experiment().trials()
    assert [Story(story.number, trial).causes for trial in trials] == [["finished"]] * 2
