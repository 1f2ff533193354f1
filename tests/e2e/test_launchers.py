"""The story under launchers other than torchrun, on this machine: bit-equal, stopped or not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.e2e.story import Story
from tests.launch import mpiruns

TWO_SLOTS = "resources.slots_per_trial=2"
ALL = ["mpich", "open_mpi", "deepspeed"]


def begin(launcher: str, *overrides: str) -> Story:
    """Start the story under `launcher`, on this machine."""
    module = "deepspeed" if launcher == "deepspeed" else "mpi"
    profile = Path(os.environ["HPC_DET_ROOT"], "conf", "cluster", "here.yaml")
    profile.parent.mkdir(parents=True)
    mpirun = "mpirun" if launcher == "deepspeed" else mpiruns.mpirun(launcher)
    profile.write_text(
        f"name: here\nscheduler: local\nslots_per_node: 2\nmax_nodes: 1\nslot_type: cpu\nmpi_launcher: [{mpirun}]\n"
    )
    entrypoint = f"entrypoint=python3 -m hpc_det.launch.{module} --trial model_def:StoryTrial"
    return Story.begin(entrypoint, TWO_SLOTS, *overrides, cluster="here")


@pytest.mark.long
@pytest.mark.parametrize("launcher", ALL)
def test_a_rank_that_raises_is_named_with_its_traceback_though_the_others_are_killed_for_it(launcher: str) -> None:
    story = begin(launcher, "hyperparameters.raise_at=3", "max_restarts=0")
    assert story.wait(check=False).returncode == 1
    assert story.causes == ["failed"]
    first = story.logged.partition("first failure: ")[2]
    assert first.startswith("rank 1 on ")
    assert 'raise RuntimeError("the sky has fallen")' in first
