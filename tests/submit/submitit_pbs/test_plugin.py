"""submitit finds the PBS plugin, and the plugin meets submitit's requirements."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import submitit
from submitit.core import plugins

from hpc_det.submit.submitit_pbs.job import PbsJob
from tests.facts import refused
from tests.submit.submitit_pbs import functions
from tests.submit.submitit_pbs.site import StubSite
from tests.wait import DEADLINE_S

pytestmark = pytest.mark.integration


def test_submitits_own_tests_of_plugins_pass(tmp_path: Path) -> None:
    pytest_alone = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--import-mode=importlib"]
    chosen = ["--rootdir", str(tmp_path), "--pyargs", "submitit.core.test_plugins", "-k", "test_env or test_executors"]
    done = subprocess.run([*pytest_alone, *chosen], cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stdout
    assert "test_executors[PbsExecutor] PASSED" in done.stdout
    assert "test_env[env3] PASSED" in done.stdout


def test_any_program_submits_to_pbs(site: StubSite, tmp_path: Path) -> None:
    executor = submitit.AutoExecutor(tmp_path / "jobs", cluster="pbs")
    executor.update_parameters(
        timeout_min=10,
        nodes=1,
        tasks_per_node=1,
        gpus_per_node=2,
        cpus_per_task=3,
        mem_gb=4,
        name="any",
        stderr_to_stdout=True,
        pbs_queue="low",
        pbs_account="physics",
        pbs_setup=["true"],
        pbs_additional_parameters={"l": "filesystems=home"},
        slurm_partition="of another cluster",
    )
    job = executor.submit(functions.add, 1, 2)
    assert isinstance(job, PbsJob)
    assert "select=1:ncpus=3:mpiprocs=1:ompthreads=3:ngpus=2:mem=4096mb\n" in job.paths.submission_file.read_text()


def test_pbs_is_found_where_there_is_no_other(site: StubSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins.get_executors()["slurm"], "affinity", lambda: -1)
    assert submitit.AutoExecutor(tmp_path).cluster == "pbs"


def test_an_unknown_parameter_is_answered_with_those_that_are_known(site: StubSite, tmp_path: Path) -> None:
    with refused(NameError, "'partition'", "'pbs'", "queue"):
        submitit.AutoExecutor(tmp_path, cluster="pbs").update_parameters(pbs_partition="x")


def test_programs_that_never_use_us_load_hardly_anything() -> None:
    code = "import sys; from submitit.core import plugins; plugins.get_executors(); print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert "hpc_det.submit.submitit_pbs.executor" in loaded
    assert not {"jinja2", "pydantic", "numpy", "torch", "hydra", "hpc_det.plan"} & set(loaded)
