"""Engines on PBS, four ranks on two nodes: requeued or deleted between two micro batches, they go on bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

import hpc_det as package
from tests.e2e.engine_story import EngineStory, UndisturbedEngines
from tests.e2e.test_matrix_pbs import preempted_in_order
from tests.labs.pbs_lab import PbsLab

pytestmark = [pytest.mark.long]

PROFILE = """
name: lab
scheduler: pbs
slots_per_node: 2
max_nodes: 3
slot_type: cpu
resource_pool: low
setup: ["export PYTHONPATH={repository}"]
resume: successor
"""


@pytest.mark.parametrize("engine", ["zero3", "pipeline"])
@pytest.mark.parametrize("letter", ["R", "D"])
def test_engines_preempted_between_two_micro_batches_go_on_bit_for_bit(
    undisturbed_engines: UndisturbedEngines, pbs_lab: PbsLab, state_folder: Path, engine: str, letter: str
) -> None:
    pbs_lab.set_kill_delay("low", 60)  # the machine may be slow
    profile = state_folder / "conf" / "cluster" / "lab.yaml"
    profile.parent.mkdir(parents=True)
    profile.write_text(PROFILE.format(repository=Path(package.__file__).parents[1]))
    story = EngineStory.with_engine(engine, 4, "hyperparameters.waits_at=[13]", cluster="lab")
    story.until_waiting(13)
    preempted_in_order(letter)(pbs_lab, story)
    story.wait()
    assert story.causes == ["preempted", "finished"], story.logged
    undisturbed = undisturbed_engines(engine, 4)
    assert story.same_as(undisturbed)
    assert [story.micro_batches(n) for n in range(4)] == [undisturbed.micro_batches(n) for n in range(4)]
