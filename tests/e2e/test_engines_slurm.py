"""Engines on a real Slurm, four ranks on two nodes, stopped at random batches, also between two micro batches. Neither
the metrics nor the shards of any rank differ from an uninterrupted run.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
from pathlib import Path

import pytest

from tests.e2e import test_slurm
from tests.e2e.engine_story import ENGINES, EngineStory, UndisturbedEngines
from tests.labs.slurm import SlurmLab

pytestmark = pytest.mark.slurm

PROFILE = """
name: lab
scheduler: slurm
slots_per_node: 2
max_nodes: 3
slot_type: cpu
resource_pool: low
signal_lead_s: 70
resume: successor
"""
LAST_BATCH = 38
"""The last batch after which there is still work left for a stop."""


@pytest.fixture(autouse=True)
def on_the_lab(slurm_lab: SlurmLab, state_folder: None, monkeypatch: pytest.MonkeyPatch) -> None:
    test_slurm.use(slurm_lab, monkeypatch, PROFILE)


def stopped(lab: SlurmLab, engine: str, accumulation: int, *stops: int, launcher: str = "deepspeed") -> EngineStory:
    """Run the story of this engine, preempted in each of these batches."""
    waits_at = f"hyperparameters.waits_at={list(stops)}"
    story = EngineStory.with_engine(engine, accumulation, waits_at, cluster="lab", launcher=launcher)
    for stop in stops:
        story.until_waiting(stop)
        lab.preempt(3, seconds=0)
    story.wait()
    assert story.causes == [*("preempted" for _ in stops), "finished"], story.logged
    return story


def assert_nothing_was_lost_or_trained_on_twice(story: EngineStory, undisturbed: EngineStory) -> None:
    for rank in range(4):
        assert story.micro_batches(rank) == undisturbed.micro_batches(rank)


@pytest.mark.long
@pytest.mark.parametrize(("engine", "launcher"), [("zero3", "direct"), ("pipeline", "deepspeed")])
def test_engines_preempted_between_two_micro_batches_go_on_bit_for_bit(
    undisturbed_engines: UndisturbedEngines, slurm_lab: SlurmLab, engine: str, launcher: str
) -> None:
    story, undisturbed = stopped(slurm_lab, engine, 4, 13, launcher=launcher), undisturbed_engines(engine, 4)
    assert story.same_as(undisturbed)
    assert_nothing_was_lost_or_trained_on_twice(story, undisturbed)
    stages = {line for rank in range(4) for line in story.lines(rank, 1) if line.startswith("stage ")}
    assert stages == ({"stage 0 on node1", "stage 1 on node2"} if engine == "pipeline" else set())


@pytest.mark.long
@pytest.mark.parametrize(("engine", "accumulation"), [*itertools.product(ENGINES, [1, 4])])
def test_engines_preempted_at_random_batches_go_on_bit_for_bit(
    undisturbed_engines: UndisturbedEngines, slurm_lab: SlurmLab, engine: str, accumulation: int
) -> None:
    stops = sorted(random.Random(f"{engine} {accumulation}").sample(range(1, LAST_BATCH), 2))
    print(f"stopped in batches {stops}")
    story, undisturbed = stopped(slurm_lab, engine, accumulation, *stops), undisturbed_engines(engine, accumulation)
    assert story.same_as(undisturbed)
    assert_nothing_was_lost_or_trained_on_twice(story, undisturbed)


@pytest.mark.long
@pytest.mark.parametrize("engine", ["zero2", "pipeline"])
def test_a_killed_agent_of_the_second_node_counts_as_a_lost_node_and_the_gang_goes_on(
    undisturbed_engines: UndisturbedEngines, slurm_lab: SlurmLab, engine: str
) -> None:
    story = EngineStory.with_engine(
        engine, 4, "hyperparameters.waits_at=[20]", "max_restarts=0", cluster="lab", launcher="torch_distributed"
    )
    story.until_waiting(20)
    os.kill(agent_of(story.rank_pid(3)), signal.SIGKILL)
    story.wait()
    assert story.causes == ["node lost", "finished"], story.logged
    assert story.same_as(undisturbed_engines(engine, 4))


def agent_of(pid: int) -> int:
    """Return the PID of the agent that is an ancestor of this process."""
    while b"hpc_det.launch.agent" not in Path(f"/proc/{pid}/cmdline").read_bytes():
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid
