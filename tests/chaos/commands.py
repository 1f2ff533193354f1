"""Run a command of hpc-det in a zygote, with all changes below the state folder disturbed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_det.cli.main import main
from hpc_det.schedulers import own_jobs
from hpc_det.view import interrupted


def command(folder: Path, say: Callable[[Any], None], arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run the command, and report its exit code to `say`."""
    os.environ.update(environment)
    own_jobs.SETTLES_S = interrupted.BARE_FOR_S = 0.0
    try:
        say(main([*arguments]))
    except SystemExit as error:
        say(error.code)
