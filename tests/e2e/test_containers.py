"""Whole lives of experiments whose ranks run in containers, with stand-ins for the container runtimes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import yaml

from tests.e2e.story import DIRECT, WAITS_AT, Story, hpc_det
from tests.launch.runtimes import IMAGE, Runtime


@pytest.fixture
def runtime(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """Install a stand-in for this runtime, and write the profile of the cluster `site`, which uses it."""
    installed = Runtime.install(request.param, tmp_path / "site")
    monkeypatch.setenv("PATH", installed.path)
    profile = {
        "name": "site",
        "scheduler": "local",
        "slots_per_node": 2,
        "max_nodes": 1,
        "slot_type": "cpu",
        "containers": {"runtime": request.param},
        "experiment": {"environment": {"image": {"cpu": IMAGE, "cuda": "site/torch-cuda:2.10"}}},
    }
    file = Path(os.environ["HPC_DET_ROOT"], "conf", "cluster", "site.yaml")
    file.parent.mkdir(parents=True)
    file.write_text(yaml.safe_dump(profile))
    return installed


@pytest.mark.long
@pytest.mark.parametrize("runtime", ["apptainer", "podman"], indirect=True)
def test_a_preempted_run_in_a_container_goes_on_bit_for_bit(
    undisturbed_alone: Story, runtime: Runtime, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    mount = f"bind_mounts=[{{host_path: {data}, container_path: /digits, read_only: true}}]"
    story = Story.begin(DIRECT, WAITS_AT.format(13), mount, cluster="site")
    story.until_batch(13)
    (agent,) = story.pids("hpc_det.launch.agent")
    os.kill(agent, signal.SIGTERM)
    story.wait()
    assert story.causes == ["preempted", "finished"]
    assert any(word.partition("=")[2].startswith(f"{data}:/digits:ro") for word in runtime.argv)
    assert story.same_as(undisturbed_alone)


@pytest.mark.integration
@pytest.mark.parametrize("runtime", [pytest.param("apptainer", marks=pytest.mark.long), "podman"], indirect=True)
def test_a_kill_leaves_no_container_running(runtime: Runtime) -> None:
    story = Story.begin(DIRECT, WAITS_AT.format(1), cluster="site")
    story.until_batch(1)
    hpc_det("experiment", "kill", story.number)
    assert story.describe()["state"] == "CANCELED"
