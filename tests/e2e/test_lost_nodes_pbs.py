"""Two ranks on two nodes of PBS, one of which is lost: they continue bit for bit on other nodes, uncharged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import hpc_det as package
from hpc_det.node.json_files import read_json
from tests.e2e.story import DIRECT, WAITS_AT, Story
from tests.labs.pbs_lab import PbsLab

PROFILE = """
name: lab
scheduler: pbs
slots_per_node: 1
max_nodes: 3
slot_type: cpu
resource_pool: low
setup: ["export PYTHONPATH={repository}:{folder}"]
"""
SHORTER = """
import hpc_det.launch.on_nodes as on_nodes
import hpc_det.launch.watch.peers as peers
on_nodes.LEAVE_S = peers.LOST_S = 4.0
"""
"""Replaces the 15 s in the processes of the jobs. A real PBS takes minutes to notice a lost node."""


@pytest.fixture
def profile(pbs_lab: PbsLab, state_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SHORTER)
    path = state_folder / "conf" / "cluster" / "lab.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(PROFILE.format(repository=Path(package.__file__).parents[1], folder=tmp_path))


TROUBLES = [PbsLab.cut_network, pytest.param(PbsLab.fail_node, marks=pytest.mark.long)]


@pytest.mark.long
@pytest.mark.parametrize("pbs_lab", [{"has_networks": True, "sister_lost_s": 360}], indirect=True)
@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_gang_goes_on_without_a_lost_node_long_before_pbs_notices(
    undisturbed: Story, pbs_lab: PbsLab, profile: None, trouble: Callable[[PbsLab, str], None]
) -> None:
    waits = ["resources.slots_per_trial=2", WAITS_AT.format(10), "max_restarts=0"]
    story = Story.begin(*waits, DIRECT, cluster="lab")
    story.until_batch(10)
    _, lost = read_json(story.trial.nodes(1)) or []
    trouble(pbs_lab, lost)
    story.wait()
    assert story.causes == ["node lost", "finished"]
    assert f"node {lost}: lost" in str(story.describe()["attempts"][0])
    assert lost not in (read_json(story.trial.nodes(2)) or [])
    assert story.same_as(undisturbed)
