"""A submitting process is killed when the scheduler has its job, before it has recorded the job's ID."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_det.store.experiments import ExperimentStore
from hpc_det.store.folders import ExperimentFolder
from hpc_det.store.submitting import submitter_of
from hpc_det.view.state import ExperimentView
from tests.e2e import test_slurm
from tests.e2e.story import COMMAND, hpc_det
from tests.e2e.test_pbs import PROFILE
from tests.labs.pbs_lab import PbsLab
from tests.labs.slurm import SlurmLab
from tests.stub import Stub
from tests.stub import stub as stub
from tests.wait import wait_for

CONFIG = """
name: orphan
entrypoint: {command}
searcher: {{metric: loss}}
"""
Create = Callable[..., ExperimentFolder]


@pytest.fixture
def create_killed(tmp_path: Path, stub: Stub) -> Create:
    """Return a function that runs `create` with this profile; the submit command kills it after the submission."""

    def run(cluster: str, submits: str, *overrides: str, command: str = "echo trained") -> ExperimentFolder:
        real = stub(submits, f'{shutil.which(submits)} "$@" >/dev/null && kill -KILL $PPID')
        config, code = tmp_path / "orphan.yaml", tmp_path / "code"
        config.write_text(CONFIG.format(command=command))
        code.mkdir()
        options = [word for override in overrides for word in ("--config", override)]
        create = [str(COMMAND), "experiment", "create", str(config), str(code), "--cluster", cluster, *options]
        assert subprocess.run(create).returncode == -signal.SIGKILL
        real.unlink()
        experiment = ExperimentStore(Path(os.environ["HPC_DET_ROOT"])).existing(1)
        assert submitter_of(experiment)
        return experiment

    return run


def is_found(experiment: ExperimentFolder, state: str) -> str:
    """Check that the next command finds the job, and return its ID."""
    assert state in hpc_det("experiment", "list").stdout
    assert submitter_of(experiment) is None
    (job_id,) = ExperimentView(experiment).job_ids()
    return job_id


@pytest.mark.integration
def test_a_job_that_has_begun_has_recorded_itself(create_killed: Create) -> None:
    experiment = create_killed("local", "env", command="sleep 300")
    wait_for(lambda: experiment.job().exists())
    is_found(experiment, "RUNNING")
    hpc_det("experiment", "kill", 1)
    hpc_det("experiment", "delete", 1, "--yes")


@pytest.mark.long
def test_a_job_that_waits_in_pbs_is_found_and_killed(
    pbs_lab: PbsLab, create_killed: Create, state_folder: Path
) -> None:
    profile = state_folder / "conf" / "cluster" / "lab.yaml"
    profile.parent.mkdir(parents=True)
    profile.write_text(PROFILE.format(repository="/", starter="pbsdsh", queue="low", slot="cpu"))
    experiment = create_killed("lab", "qsub", "pbs.pbsbatch_args=[-h]")
    job_id = is_found(experiment, "QUEUED")
    assert pbs_lab.job(job_id)["job_state"] == "H"
    hpc_det("experiment", "kill", 1)
    pbs_lab.wait_for(job_id, "F")
    hpc_det("experiment", "delete", 1, "--yes")


@pytest.fixture
def on_the_lab(slurm_lab: SlurmLab, state_folder: None, monkeypatch: pytest.MonkeyPatch) -> None:
    test_slurm.use(slurm_lab, monkeypatch)


@pytest.mark.slurm
@pytest.mark.usefixtures("on_the_lab")
def test_a_job_that_waits_in_slurm_is_found_and_killed(slurm_lab: SlurmLab, create_killed: Create) -> None:
    experiment = create_killed("lab", "sbatch", "resources.slots_per_trial=1", "slurm.sbatch_args=[--hold]")
    job_id = is_found(experiment, "QUEUED")
    assert slurm_lab.job(job_id)["JobState"] == "PENDING"
    hpc_det("experiment", "kill", 1)
    assert slurm_lab.job(job_id)["JobState"] == "CANCELLED"
    hpc_det("experiment", "delete", 1, "--yes")


@pytest.mark.slurm
@pytest.mark.usefixtures("on_the_lab")
def test_a_job_that_slurm_runs_goes_to_its_end(create_killed: Create) -> None:
    experiment = create_killed("lab", "sbatch", "resources.slots_per_trial=1")
    hpc_det("experiment", "wait", 1)
    is_found(experiment, "COMPLETED")
