"""The wheel works as pip installs it from a package index: with the oldest and the newest Python and torch.

Each installation downloads 3 GB and takes 6 GB on disk, unless the index offers a CPU build of torch.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_distribution import CHECKOUT, run, wheel

__all__ = ["wheel"]

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

TOOLS = ("hypothesis", "pytest<9.2", "pytest-timeout", "pytest-xdist", "tqdm")
TORCH_FACING = ("tests/checkpoint", "tests/core", "tests/distributed", "tests/pytorch", "tests/sgd")
NEEDS_EXTRAS = ("tests/pytorch/deepspeed", "tests/pytorch/state/test_resume_trace.py")


def lowest_torch() -> str:
    (found,) = re.findall(r'"torch>=([\d.]+)"', (CHECKOUT / "pyproject.toml").read_text())
    return f"torch=={found}.*"


@pytest.fixture(params=[("3.10", lowest_torch()), ("3.13", "torch")], ids=["oldest", "newest"], scope="module")
def bin_folder(request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the `bin` of a virtual environment into which pip has installed the wheel, with one torch."""
    version, torch = request.param
    python = shutil.which(f"python{version}")
    if python is None or not runs(python):
        pytest.skip(f"python{version} is not installed")
    # not in the folder of temporary files, which may be in memory
    folder = CHECKOUT / "build" / "installations" / f"python{version}"
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([python, "-m", "venv", folder], check=True)
    install: list[str | Path] = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-cache-dir"]
    run(*install, torch, cwd=folder)
    before = installed_torch(folder)
    run(*install, wheel, *TOOLS, cwd=folder)
    assert installed_torch(folder) == before, "pip has replaced the torch that was there"
    yield folder / "bin"
    shutil.rmtree(folder)


def runs(python: str) -> bool:
    """Return whether this Python starts; a shim of pyenv may lead to nothing."""
    return subprocess.run([python, "-c", ""], capture_output=True).returncode == 0


def installed_torch(folder: Path) -> str:
    code = "import importlib.metadata as metadata; print(metadata.version('torch'))"
    return run(folder / "bin" / "python", "-c", code, cwd=folder).strip()


def test_the_digits_train(bin_folder: Path, tmp_path: Path) -> None:
    root = tmp_path / "states"
    for command in (("run", "experiment=digits", "searcher.max_length={epochs: 2}"), ("experiment", "wait", "1")):
        run(bin_folder / "hpc-det", *command, cwd=tmp_path, root=root)
    assert "COMPLETED" in run(bin_folder / "hpc-det", "experiment", "list", cwd=tmp_path, root=root)


def test_whatever_uses_torch_passes_its_unit_tests(bin_folder: Path) -> None:
    pytest_there: list[str | Path] = [
        bin_folder / "python",
        "-m",
        "pytest",
        "-q",
        "--numprocesses=2",
        "-p",
        "no:cacheprovider",
    ]
    chosen = ["-m", "not integration and not slurm and not gpu and not long and not chaos", *TORCH_FACING]
    left_out = [f"--ignore={path}" for path in NEEDS_EXTRAS]
    # What another torch warns of is no defect here.
    done = subprocess.run(
        [*pytest_there, "-o", "filterwarnings=default", *chosen, *left_out],
        cwd=CHECKOUT,
        env=os.environ | {"PYTHONPATH": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-20_000:]


def test_a_remedy_installs_an_extra_without_the_checkout(bin_folder: Path, tmp_path: Path) -> None:
    """pip finds the requirements of the extra in the installed package, whatever it was installed from."""
    code = "from hpc_det.errors import pip_install; print(pip_install('hpc_det[mpi]'))"
    remedy = run(bin_folder / "python", "-c", code, cwd=tmp_path).strip().strip("`")
    run("bash", "-c", f"{remedy} --quiet", cwd=tmp_path)
    run(bin_folder / "python", "-c", "import importlib.metadata as m; m.version('mpi4py')", cwd=tmp_path)
