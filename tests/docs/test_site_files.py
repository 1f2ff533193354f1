"""The files for a site in docs/examples/site: a module file, and the recipe of an image."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.test_distribution import installed as installed
from tests.test_distribution import wheel as wheel

FOLDER = Path(__file__).parents[2] / "docs" / "examples" / "site"
STUBS = """
foreach command {prepend-path setenv conflict module-whatis} {
    proc $command {args} [format {puts "%s $args"} $command]
}
"""
"""Commands that a module system defines; these print themselves."""


@pytest.mark.integration
@pytest.mark.skipif(not shutil.which("tclsh"), reason="tclsh is not installed")
def test_the_module_file_sets_the_path_the_sites_configuration_and_the_users_storage() -> None:
    program = f"{STUBS}source {FOLDER / 'modulefile'}\nModulesHelp\n"
    done = subprocess.run(
        ["tclsh"], input=program, capture_output=True, text=True, env={**os.environ, "USER": "ada"}, check=True
    )
    changes = {tuple(line.split()) for line in done.stdout.splitlines() if not line.startswith("module-whatis")}
    assert changes == {
        ("conflict", "hpc_det"),
        ("prepend-path", "PATH", "/opt/hpc_det/0.1.0/bin"),
        ("prepend-path", "HPC_DET_SITE_CONF", "/opt/hpc_det/conf"),
        ("setenv", "HPC_DET_ROOT", "/scratch/ada/hpc_det"),
    }
    assert "hpc-det --help" in done.stderr


def section(name: str) -> str:
    """Return the lines of a section of the recipe."""
    text = (FOLDER / "hpc_det.def").read_text()
    found = re.search(rf"(?ms)^%{name}\n(.*?)(?=^%|\Z)", text)
    assert found
    return found[1]


@pytest.mark.long
def test_the_recipe_installs_the_wheel_and_tests_it(wheel: Path, installed: Path, tmp_path: Path) -> None:
    """Apptainer is not needed: the lines run in a virtual environment, with dependencies of this one."""
    env = {
        **os.environ,
        "PATH": f"{installed}{os.pathsep}{os.environ['PATH']}",
        "PIP_NO_DEPS": "1",
        "PIP_FORCE_REINSTALL": "1",
    }
    for name in ("post", "test"):
        lines = section(name).replace("/opt/wheels", str(wheel.parent))
        done = subprocess.run(["sh", "-ec", lines], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "validation at batch 1 of 1" in done.stdout
