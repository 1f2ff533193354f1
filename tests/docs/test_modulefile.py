"""The environment module of docs/how-to/deploy-for-a-site.md, read by a Tcl with the commands of module systems."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "deploy-for-a-site.md"
COMMANDS = """
proc module-whatis {text} {}
proc conflict {args} {}
proc prepend-path {name value} { lappend ::found "$name=$value:" }
proc setenv {name value} { lappend ::found "$name=$value" }
"""


def module_file() -> str:
    (text,) = re.findall(r"^```tcl\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return text  # type: ignore[no-any-return]


def test_the_module_file_sets_what_the_page_says() -> None:
    tkinter = pytest.importorskip("tkinter")  # Debian packages it separately
    tcl = tkinter.Tcl()
    tcl.eval(COMMANDS)
    tcl.eval(module_file())
    assert tcl.splitlist(tcl.getvar("found")) == (
        "PATH=/sw/hpc_det/0.1/venv/bin:",
        "HPC_DET_SITE_CONF=/sw/hpc_det/site",
    )


def test_it_begins_as_module_systems_require() -> None:
    assert module_file().startswith("#%Module1.0\n")
