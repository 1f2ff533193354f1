"""Hydra apps on a real Slurm: a job array of gangs that are preempted and requeued."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_det.store.experiments import ExperimentStore
from hpc_det.store.journal import Journal
from tests.e2e.test_slurm import use
from tests.labs.slurm import SlurmLab
from tests.sweep.test_stops import COUNTS, HOOK
from tests.wait import DEADLINE_S, wait_for

pytestmark = [pytest.mark.slurm]


@pytest.fixture
def folder(slurm_lab: SlurmLab, state_folder: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder for the app that all nodes share."""
    use(slurm_lab, monkeypatch)
    return slurm_lab.folder()


def start(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    launcher = ["hydra/launcher=hpc_slurm", "hydra.launcher.cluster=lab", "hydra.sweep.dir=out"]
    command = [sys.executable, "app.py", "-m", *launcher, *overrides]
    return subprocess.Popen(
        command, cwd=folder, env=os.environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def test_points_are_elements_of_one_array_and_a_preempted_gang_goes_on_where_it_saved(
    slurm_lab: SlurmLab, folder: Path
) -> None:
    (folder / "app.py").write_text(COUNTS.replace("{hook}", HOOK))
    experiment = ExperimentStore(Path(os.environ["HPC_DET_ROOT"])).folder(1)
    with start(folder, "+x=1,2", "hydra.launcher.slots=2") as sweep:
        logs = [experiment.trial(number).rank_log(1, rank) for number in (1, 2) for rank in (0, 1)]
        wait_for(lambda: all(log.exists() and "has begun" in log.read_text() for log in logs), DEADLINE_S)
        slurm_lab.preempt(3, seconds=2)
        wait_for(lambda: all(experiment.trial(number).rank_log(2, 0).exists() for number in (1, 2)), DEADLINE_S)
        (folder / "go").touch()
        said, _ = sweep.communicate(timeout=DEADLINE_S)
    assert sweep.returncode == 0, said
    for number in (1, 2):
        assert [end.cause.value for end in Journal(experiment.trial(number).journal).history()] == [
            "preempted",
            "finished",
        ]
        assert (folder / "out" / str(number - 1) / "step-1").exists()
    assert len(list(experiment.jobs.glob("[0-9].json"))) == 1
