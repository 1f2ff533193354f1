"""The wheel and the sdist contain what users need, and the wheel works outside of the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[1]
DIGITS = (CHECKOUT / "conf" / "experiment" / "digits.yaml", CHECKOUT / "docs" / "examples" / "digits")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder, cwd=CHECKOUT)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the `bin` of a virtual environment with the wheel; its dependencies are those of this environment."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, symlinks=True)
    run(sys.executable, "-m", "pip", "--python", folder, "install", "--quiet", "--no-deps", wheel, cwd=folder)
    (packages,) = (folder / "lib").glob("python3.*/site-packages")
    # Only sys.path is extended, so that the editable install's own .pth file in that folder has no effect.
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return folder / "bin"


def run(*command: str | Path, cwd: Path, root: Path | None = None) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if root:
        env["HPC_DET_ROOT"] = str(root)
    done = subprocess.run(command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.long
def test_the_wheel_holds_the_package_and_what_it_reads(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    tracked = run("git", "ls-files", "hpc_det", "hydra_plugins", cwd=CHECKOUT).split()
    data = run("git", "ls-files", "conf", "slurm_templates", "docs/examples", cwd=CHECKOUT).split()
    assert {*tracked, *(f"hpc_det/_data/{name}" for name in data)} - names == set()
    (license_file,) = (name for name in names if name.endswith(".dist-info/licenses/LICENSE"))
    assert "Apache License" in zipfile.ZipFile(wheel).read(license_file).decode()
    assert not [name for name in names if name.startswith(("tests/", "docs/"))]


@pytest.mark.long
def test_the_sdist_holds_the_checkout(tmp_path: Path) -> None:
    run(sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir", tmp_path, cwd=CHECKOUT)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert set(run("git", "ls-files", cwd=CHECKOUT).split()) - names == set()


@pytest.mark.long
@pytest.mark.parametrize("command", [["hpc-det"], ["python", "-m", "hpc_det"]], ids=" ".join)
def test_the_installed_wheel_plans_a_job(installed: Path, command: list[str], tmp_path: Path) -> None:
    program: list[str | Path] = [installed / command[0], *command[1:]]
    shown = run(*program, "experiment", "create", *DIGITS, "--cluster", "slurm", "--dry-run", cwd=tmp_path)
    assert shown.startswith("#!/bin/bash\n")
    assert f"{installed}/python" in shown


@pytest.mark.integration
def test_the_wheel_alone_trains_the_digits(installed: Path, tmp_path: Path) -> None:
    """Outside of the checkout, and without any of the extras: the example contains its data."""
    root = tmp_path / "states"
    run(installed / "hpc-det", "run", "experiment=digits", "searcher.max_length={epochs: 2}", cwd=tmp_path, root=root)
    run(installed / "hpc-det", "experiment", "wait", "1", cwd=tmp_path, root=root)
    shown = run(installed / "hpc-det", "experiment", "describe", "1", "--json", cwd=tmp_path, root=root)
    assert json.loads(shown)["state"] == "COMPLETED"
