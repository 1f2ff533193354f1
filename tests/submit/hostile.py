"""Values that a shell, a template or sbatch would take for more, and a stand-in for Python that notes what it got."""

from __future__ import annotations

from pathlib import Path

VALUES = [
    "two words",
    "it's",
    'a "quoted" word',
    "$(touch X)",
    "`touch X`",
    "; touch X;",
    "&& touch X",
    "$HOME",
    "100%j",
    "# no comment",
    "back\\slash\\",
    "\\' touch X \\'",
    "{{ 7 * 7 }} {% if %}",
    "größe 数",
    "--flag",
    "*",
]
ALL = " ".join(VALUES)
"""All in one, without a slash, so that it is the name of a file, too."""

TELLTALE = """#!/bin/bash
told=$(dirname "$0")/../told
printf '%s\\0' "$@" >"$told/argv"
pwd >"$told/cwd"
printf '%s' "$PATH" >"$told/path"
touch "$told/done"
"""


def telltale_python(folder: Path) -> tuple[Path, Path]:
    """An executable that notes its arguments, and the folder where it notes them."""
    told = folder / "told"
    told.mkdir(parents=True)
    python = folder / "bin" / "python"
    python.parent.mkdir()
    python.write_text(TELLTALE)
    python.chmod(0o755)
    return python, told


def arguments(told: Path) -> list[str]:
    return (told / "argv").read_bytes().decode().split("\0")[:-1]
