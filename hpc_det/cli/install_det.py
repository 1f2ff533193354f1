"""hpc-det install-det: the same commands under the name that Determined's users type.

An extra cannot bring a script of its own: installers make all scripts of a package, whatever extras were chosen, and
this one must not replace the `det` of a Determined that lies in the same environment. So it is a command.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from hpc_det.errors import UsageError
from hpc_det.node.files import write_first

MARK = "from hpc_det.cli.main import main_as_det"
_SCRIPT = f"""#!{{python}}
import sys

{MARK}

sys.exit(main_as_det())
"""


@click.command("install-det")
@click.option("--folder", type=click.Path(path_type=Path), help="Where to; by default beside the python of hpc-det.")
@click.option("--remove", is_flag=True, help="Take it away again.")
def install_det(folder: Path | None, remove: bool) -> None:
    """Give hpc-det the second name det.

    For fingers and scripts that know Determined. A `det` that is there already is not replaced: it is Determined's.

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
    if " " in sys.executable or len(sys.executable) > 120:  # the kernel cuts such a first line (execve(2))
        raise UsageError(f"{script}: {sys.executable} cannot stand in a script's first line; install a shorter path")
    script.parent.mkdir(parents=True, exist_ok=True)
    if not write_first(script, _SCRIPT.format(python=sys.executable)) and not _is_ours(script):
        raise UsageError(f"{script}: is another program, which stays; choose another place with --folder")
    script.chmod(0o755)


def _remove(script: Path) -> None:
    if not script.exists():
        raise UsageError(f"{script}: is not there; say where it is with --folder")
    if not _is_ours(script):
        raise UsageError(f"{script}: is another program, which stays")
    script.unlink()


def _is_ours(script: Path) -> bool:
    return MARK in script.read_text(encoding="utf-8", errors="replace")
