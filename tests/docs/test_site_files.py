"""The files for a site in docs/examples/site: a module file, and the recipe of an image."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.test_distribution import installed as installed
from tests.test_distribution import wheel as wheel

FOLDER = Path(__file__).parents[2] / "docs" / "examples" / "site"
STUBS = """
foreach command {prepend-path setenv conflict module-whatis} {
    proc $command {args} [format {lappend ::found "%s $args"} $command]
}
rename puts printed
proc puts {channel text} { lappend ::found $text }
"""
"""Commands that a module system defines, and `puts`; these collect what they are given."""


def test_the_module_file_sets_the_path_and_the_sites_configuration() -> None:
    tcl = pytest.importorskip("tkinter").Tcl()  # Debian packages it separately
    tcl.eval(STUBS)
    tcl.eval((FOLDER / "modulefile").read_text())
    tcl.eval("ModulesHelp")
    *changes, help_text = tcl.splitlist(tcl.getvar("found"))
    assert [change for change in changes if not change.startswith("module-whatis")] == [
        "conflict hpc_det",
        "prepend-path PATH /sw/hpc_det/0.1/venv/bin",
        "prepend-path HPC_DET_SITE_CONF /sw/hpc_det/site",
    ]
    assert "hpc-det --help" in help_text
    assert (FOLDER / "modulefile").read_text().startswith("#%Module1.0\n")


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
