"""The sbatch calls and scripts of a sweep on Slurm; a stand-in for sbatch records them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.sweep.conftest import App, source

pytestmark = pytest.mark.integration

PROFILE = "{name: lab, scheduler: slurm, slots_per_node: 4, slot_type: gpu, max_array_size: 40}"


@pytest.fixture
def scripts(app: App, tmp_path: Path, state_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the submitted scripts, which are named 1, 2, ..."""
    folder, commands = tmp_path / "scripts", tmp_path / "bin"
    for made in (folder, commands, state_folder / "conf" / "cluster"):
        made.mkdir(parents=True)
    (commands / "sbatch").write_text(
        f'#!/bin/bash\nnumber=$(($(ls {folder} | wc -l) + 1))\ncp "${{@: -1}}" {folder}/$number\n'
        f'echo "$@" >>{tmp_path}/calls\necho 470$number\n'
    )
    (commands / "sbatch").chmod(0o755)
    (state_folder / "conf" / "cluster" / "lab.yaml").write_text(PROFILE)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    app.write("app.py", source("return 1"))
    return folder


SLURM = ("hydra/launcher=hpc_slurm", "hydra.launcher.cluster=lab", "hydra.launcher.wait=false")


def test_a_sweep_is_one_call_of_the_scheduler(app: App, scripts: Path) -> None:
    app.succeed(*SLURM, "+x=range(0,40)", "hydra.launcher.array_parallelism=8")
    assert [path.name for path in scripts.iterdir()] == ["1"]
    script = (scripts / "1").read_text()
    assert "#SBATCH --array=0-39%8\n" in script
    assert "#SBATCH --requeue\n" in script
    assert {point["state"] for point in app.points()} == {"QUEUED"}


def test_a_sweep_longer_than_an_array_may_be_is_several(app: App, scripts: Path) -> None:
    app.succeed(*SLURM, "+x=range(0,100)")
    assert sorted(path.name for path in scripts.iterdir()) == ["1", "2", "3"]
    assert "#SBATCH --array=0-19\n" in (scripts / "3").read_text()


def test_fields_reach_the_script(app: App, scripts: Path) -> None:
    app.succeed(
        *SLURM,
        "+x=1",
        "hydra.launcher.slots=8",
        "hydra.launcher.time_limit=1:30:00",
        "hydra.launcher.resource_pool=fast",
        "hydra.launcher.sbatch_args=[--exclusive]",
        "hydra.job.name=a name",
    )
    script = (scripts / "1").read_text()
    for line in (
        '"--job-name=a name"',
        "--nodes=2",
        "--gpus-per-node=4",
        "--time=90",
        "--partition=fast",
        "--exclusive",
    ):
        assert line in script
    assert "--array" not in script
