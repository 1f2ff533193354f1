"""hpc-det environment, and the keys `environment.bundle` and `environment.stage` of experiments that are submitted."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from hpc_det.plan.job_plan import JobPlan
from hpc_det.store.folders import ExperimentFolder
from hpc_det.submit import bundle, stage
from tests.cli.conftest import Command
from tests.installed_packages import Site
from tests.small_environment import Environment

integration = pytest.mark.integration

SLURM = ("--cluster", "slurm")
PAUSED = (*SLURM, "--paused")
WITH_BUNDLE = ("--config", "environment.bundle=true")


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Bundle a few packages in place of those of the tests."""
    site = Site.install(tmp_path)
    monkeypatch.setattr(bundle, "site_folders", lambda: [str(site.folder)])
    return site


def bundles(root: Path) -> list[Path]:
    return [*(root / ".bundles").iterdir()] if (root / ".bundles").exists() else []


def plan_of(root: Path, experiment: int = 1) -> JobPlan:
    return JobPlan.of(ExperimentFolder(root / "experiments" / str(experiment)))


def test_the_command_writes_the_bundle_once(hpc_det: Command, root: Path, site: Site) -> None:
    assert hpc_det("environment", "bundle").succeeds("1 package")
    written = bundles(root)[0].stat().st_ino
    assert hpc_det("environment", "bundle").succeeds("already")
    assert bundles(root)[0].stat().st_ino == written
    site.write("bundled_single.py", "edited = True\n")
    assert hpc_det("environment", "bundle").succeeds("Wrote")
    assert len(bundles(root)) == 1


@integration
def test_a_submission_writes_the_bundle_that_its_plan_names(
    hpc_det: Command, root: Path, config: Path, code: Path
) -> None:
    created = hpc_det("experiment", "create", config, code, *PAUSED, *WITH_BUNDLE)
    (written,) = bundles(root)
    assert created.code == 0
    assert str(written) in created.err
    assert plan_of(root).bundle == str(written)
    assert bundle.is_current(written)
    assert hpc_det("experiment", "create", config, code, *PAUSED, *WITH_BUNDLE).err == ""


def test_a_dry_run_writes_no_bundle(hpc_det: Command, root: Path, config: Path, code: Path) -> None:
    assert hpc_det("experiment", "create", config, code, *SLURM, *WITH_BUNDLE, "--dry-run").code == 0
    assert not root.exists()


@integration
def test_without_a_bundle_or_with_an_image_no_file_is_written(
    hpc_det: Command, root: Path, config: Path, code: Path
) -> None:
    profile = root / "conf" / "cluster" / "boxed.yaml"
    profile.parent.mkdir(parents=True, mode=0o700)
    profile.write_text(
        "{name: boxed, scheduler: slurm, slots_per_node: 4, slot_type: gpu, containers: {runtime: apptainer}}"
    )
    image = ("--cluster", "boxed", "--paused", "--config", "environment.image=/images/train.sif")
    created = hpc_det("experiment", "create", config, code, *WITH_BUNDLE, *image)
    assert "environment.bundle: has no effect" in created.err
    hpc_det("experiment", "create", config, code, *PAUSED)
    assert (bundles(root), plan_of(root, 1).bundle, plan_of(root, 2).bundle) == ([], "", "")


@integration
def test_a_full_disk_is_noted_and_the_experiment_is_created(
    hpc_det: Command, root: Path, config: Path, code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> bundle.Written:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(bundle, "write_bundle", full)
    created = hpc_det("experiment", "create", config, code, *PAUSED, *WITH_BUNDLE)
    assert (created.code, created.out) == (0, "Created experiment 1\n")
    assert "No space left" in created.err


@integration
def test_the_command_writes_the_archive_once(
    hpc_det: Command, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = Environment.make(tmp_path / "venv", monkeypatch)
    assert hpc_det("environment", "stage").succeeds("Wrote", environment.prefix, "tar file")
    assert hpc_det("environment", "stage").succeeds("already")
    environment.install("later")
    assert hpc_det("environment", "stage").succeeds("Wrote")
    assert [path.suffix for path in bundles(root)] == [".tar"]
    (environment.prefix / "pyvenv.cfg").unlink()
    assert hpc_det("environment", "stage").fails(1, "neither a venv nor a conda environment")


@integration
def test_a_submission_writes_the_archive_and_its_agents_start_from_a_copy(
    hpc_det: Command, root: Path, config: Path, code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Environment.make(tmp_path / "venv", monkeypatch)
    with_stage = ("--config", "environment.stage=tar")
    created = hpc_det("experiment", "create", config, code, *PAUSED, *with_stage)
    (written,) = bundles(root)
    assert created.code == 0
    assert str(written) in created.err
    assert plan_of(root).stage == str(written)
    assert stage.is_current(written)
    assert f"hpc_det.launch.staged {written} '' hpc_det.launch.agent" in plan_script(root)
    assert hpc_det("experiment", "create", config, code, *PAUSED, *with_stage).err == ""
    hpc_det("experiment", "create", config, code, *PAUSED)
    assert plan_of(root, 3).stage == ""
    assert "hpc_det.launch.staged" not in plan_script(root, 3)


def plan_script(root: Path, experiment: int = 1) -> str:
    """Return the job script of an experiment."""
    return ExperimentFolder(root / "experiments" / str(experiment)).script().read_text()


@integration
def test_an_environment_that_cannot_be_archived_is_noted_and_the_experiment_is_created(
    hpc_det: Command, root: Path, config: Path, code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = Environment.make(tmp_path / "venv", monkeypatch)
    (environment.prefix / "pyvenv.cfg").unlink()
    created = hpc_det("experiment", "create", config, code, *PAUSED, "--config", "environment.stage=image")
    assert (created.code, created.out) == (0, "Created experiment 1\n")
    assert "neither a venv nor a conda environment" in created.err
    assert bundles(root) == []
