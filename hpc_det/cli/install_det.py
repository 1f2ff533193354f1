"""hpc-det install-det: install the script `det`, the name of the command line that Determined's users type.

This is a command and not an extra of the package: installers create all scripts of a package, whatever extras were
chosen, and this script must not replace the `det` of a Determined in the same environment.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from hpc_det.errors import UsageError
from hpc_det.node.files import write_first

MARK = "from hpc_det.cli.main import main_as_det"  # only scripts with this line may be replaced or removed
_SCRIPT = f"""#!{{python}}
import sys

{MARK}

sys.exit(main_as_det())
"""


@click.command("install-det")
@click.option(
    "--folder", type=click.Path(path_type=Path), help="Folder of the script; default: that of hpc-det's Python."
)
@click.option("--remove", is_flag=True, help="Remove the script.")
def install_det(folder: Path | None, remove: bool) -> None:
    """Install `det` as a second name of hpc-det.

    For users and scripts that know Determined. A `det` of another program, such as Determined itself, is never
    replaced.

    \b
    Example:
      hpc-det install-det --folder bin
    """
    script = (folder or Path(sys.executable).parent).absolute() / "det"
    if remove:
        _remove(script)
        click.echo(f"Removed {script}")
    else:
        _install(script)
        click.echo(f"Installed {script}")


def _install(script: Path) -> None:
    # a blank ends the interpreter's path in a first line, and Linux before 5.1 cuts the line at 127 bytes (execve(2))
    if " " in sys.executable or len(sys.executable) > 120:
        raise UsageError(
            f"{script}: {sys.executable} is too long or has a blank, so it cannot be in a script's first line; install "
            "hpc_det in a shorter path without blanks"
        )
    script.parent.mkdir(parents=True, exist_ok=True)
    if not write_first(script, _SCRIPT.format(python=sys.executable)) and not _is_ours(script):
        raise UsageError(f"{script}: is another program and was not replaced; choose another folder with --folder")
    script.chmod(0o755)


def _remove(script: Path) -> None:
    if not script.exists():
        raise UsageError(f"{script}: does not exist; pass its folder with --folder")
    if not _is_ours(script):
        raise UsageError(f"{script}: is another program and was not removed")
    script.unlink()


def _is_ours(script: Path) -> bool:
    return MARK in script.read_text(encoding="utf-8", errors="replace")
