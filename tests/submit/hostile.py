"""Values with a meaning for a shell, a template or sbatch, and a stand-in for Python that records its arguments."""

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
"""All values in one, without a slash, so that it can be the name of a file."""

TELLTALE = """#!/bin/bash
records=$(dirname "$0")/../records
printf '%s\\0' "$@" >"$records/argv"
pwd >"$records/cwd"
printf '%s' "$PATH" >"$records/path"
touch "$records/done"
"""


def telltale_python(folder: Path) -> tuple[Path, Path]:
    """Return an executable that records its arguments, and the folder of its records."""
    records = folder / "records"
    records.mkdir(parents=True)
    python = folder / "bin" / "python"
    python.parent.mkdir()
    python.write_text(TELLTALE)
    python.chmod(0o755)
    return python, records


def arguments(records: Path) -> list[str]:
    return (records / "argv").read_bytes().decode().split("\0")[:-1]
