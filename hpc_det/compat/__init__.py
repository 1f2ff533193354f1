"""Where it is switched on, `import determined` gives hpc_det's own classes: unmodified model files run.

    python3 -m hpc_det.compat SCRIPT ARGS...     for one program, and for every Python that it starts
    hpc_det.compat.install()                     for this process, from here on
    HPC_DET_COMPAT=determined                    for an experiment, among its environment_variables

`path/` comes first on the module search path. The package `determined` in it holds what only Determined has; what has a
counterpart is found by hpc_det.compat.aliases. Nothing heavy is loaded before somebody imports it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from hpc_det.config.rank_variables import DETERMINED
from hpc_det.errors import UsageError

_PATH = str(Path(__file__).with_name("path"))


def install() -> None:
    """From now on `import determined` finds hpc_det, also in processes that `multiprocessing` starts.

    Raises UsageError where another `determined` is imported already: its classes would not be ours.
    """
    already = sys.modules.get(DETERMINED)
    if already and not str(already.__file__).startswith(_PATH):
        raise UsageError(f"hpc_det.compat: {already.__file__} is imported already; call install() before")
    if _PATH not in sys.path:
        sys.path.insert(0, _PATH)


def for_children(env: Mapping[str, str]) -> dict[str, str]:
    """`env`, changed so that every Python started with it finds hpc_det as `determined`."""
    return {**env, "PYTHONPATH": os.pathsep.join(filter(None, [_PATH, env.get("PYTHONPATH")]))}
