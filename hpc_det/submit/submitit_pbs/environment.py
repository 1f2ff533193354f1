"""Variables for another machine, as shell lines in a file.

`qsub -V` and `-v` lose or break values (exported functions, commas, quotes), and processes that pbs_tmrsh starts get
nothing of the script's environment.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OF_THE_MACHINE = re.compile(
    r"PBS_.*|NCPUS|ENVIRONMENT|TMPDIR|HOME|USER|LOGNAME|SHELL|HOSTNAME|PWD|OLDPWD|SHLVL|_|TERM|DISPLAY|SSH_.*|XDG_.*|"
    r"SUBMITIT_(EXECUTOR|FOLDER|LOCAL_.*|PBS_.*)"
)
"""What PBS, a login or an outer job sets."""


def write_environment(path: Path, environ: Mapping[str, str], more: Mapping[str, str] | None = None) -> None:
    """For its owner alone: values may be secrets. Of `environ` goes what belongs to no machine, and `more` as it is."""
    carried = {name: value for name, value in environ.items() if _is_carried(name)} | dict(more or {})
    lines = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in sorted(carried.items()))
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", errors="surrogateescape") as file:
        file.write(lines)


def _is_carried(name: str) -> bool:
    return bool(_NAME.fullmatch(name)) and not _OF_THE_MACHINE.fullmatch(name)
