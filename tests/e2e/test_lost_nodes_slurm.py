"""Ranks on two nodes of a real Slurm, one of which is lost: they continue bit for bit on other nodes, uncharged."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

import pytest

from hpc_det.node.json_files import read_json
from hpc_det.store.attempt import first_failure
from tests.e2e.story import WAITS_AT, Story
from tests.e2e.test_slurm import PROFILE, use
from tests.labs.slurm import SlurmLab
from tests.wait import DEADLINE_S, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.long]  # Slurm itself is slow to release a lost node

ON_TWO_NODES = ["resources.slots_per_trial=4", "max_restarts=0"]
NOTICED_S = 90.0
"""Much less than the five minutes after which this Slurm marks a node as down."""


class Nodes:
    """Takes nodes away, and restores them after the test."""

    def __init__(self, lab: SlurmLab) -> None:
        self.lab = lab
        self._powered_off: list[str] = []
        self._cut: list[str] = []

    def power_off(self, name: str) -> None:
        self._powered_off.append(name)
        self.lab.fail_node(int(name.removeprefix("node")))

    def cut(self, name: str) -> None:
        self._cut.append(name)
        self.lab.cut_network(int(name.removeprefix("node")))

    def call_down(self, name: str) -> None:
        """Mark a node as down, as an operator does, or Slurm itself after minutes. The other nodes are not free before
        that.
        """
        self.lab.run("scontrol", "update", f"NodeName={name}", "State=DOWN", "Reason=lost")

    def close(self) -> None:
        for name in self._cut:
            self.lab.mend_network(int(name.removeprefix("node")))
        for name in self._powered_off:
            self.lab.repair_node(int(name.removeprefix("node")))
        self.lab.cancel_all()  # a job does not leave a node that does not respond
        for name in (*self._cut, *self._powered_off):
            wait_for(partial(self._is_idle, name), DEADLINE_S)

    def _is_idle(self, name: str) -> bool:
        with suppress(RuntimeError):  # when the node reports, Slurm may resume it by itself, and then refuses this
            self.lab.run("scontrol", "update", f"NodeName={name}", "State=RESUME")
        return (
            self.lab.run("sinfo", "--noheader", "--partition=low", f"--nodes={name}", "--format=%T").strip() == "idle"
        )


@pytest.fixture
def nodes(slurm_lab: SlurmLab, monkeypatch: pytest.MonkeyPatch, state_folder: None) -> Iterator[Nodes]:
    use(slurm_lab, monkeypatch)
    nodes = Nodes(slurm_lab)
    yield nodes
    nodes.close()


@pytest.fixture(scope="module")
def undisturbed(slurm_lab: SlurmLab) -> Story:
    with pytest.MonkeyPatch.context() as patch:
        use(slurm_lab, patch)
        story = Story.begin(*ON_TWO_NODES, cluster="lab")
        story.wait()
    return story


@pytest.mark.parametrize("trouble", [Nodes.cut, Nodes.power_off])
def test_a_gang_goes_on_without_a_node_that_was_lost_in_training(
    undisturbed: Story, nodes: Nodes, trouble: Callable[[Nodes, str], None]
) -> None:
    story = Story.begin(*ON_TWO_NODES, WAITS_AT.format(10), cluster="lab")
    story.until_batch(10)
    _, lost = read_json(story.trial.nodes(1)) or []
    began = time.monotonic()
    trouble(nodes, lost)
    story.until_ended(1)
    assert time.monotonic() - began < NOTICED_S
    verdict = first_failure(story.trial, 1)  # ranks may have reported other failures before
    assert verdict is not None
    assert (verdict.host, verdict.node_lost) == (lost, True)
    nodes.call_down(lost)
    story.wait()
    assert story.causes == ["node lost", "finished"]
    assert lost not in (read_json(story.trial.nodes(2)) or [])
    assert story.same_as(undisturbed)


@pytest.mark.parametrize("trouble", [Nodes.cut, Nodes.power_off])
def test_a_gang_goes_on_without_a_node_that_was_lost_before_its_agent_began(
    undisturbed: Story, nodes: Nodes, monkeypatch: pytest.MonkeyPatch, trouble: Callable[[Nodes, str], None]
) -> None:
    folder = nodes.lab.folder()
    waits = f'setup: ["touch {folder}/here; while [ ! -e {folder}/go ]; do sleep 0.05; done"]\n'
    use(nodes.lab, monkeypatch, PROFILE + waits)
    story = Story.begin(*ON_TWO_NODES, cluster="lab")
    wait_for((folder / "here").exists)
    lost = nodes.lab.run("scontrol", "show", "hostnames", nodes.lab.job(story.job_id)["NodeList"]).split()[-1]
    trouble(nodes, lost)
    (folder / "go").touch()
    began = time.monotonic()
    story.until_ended(1)
    assert time.monotonic() - began < NOTICED_S
    nodes.call_down(lost)
    story.wait()
    assert story.causes == ["node lost", "finished"]
    assert story.same_as(undisturbed)
