"""Support for programs written for Determined or RaySGD: `import determined` and `import ray` import hpc_det's classes.

It is enabled in one of three ways:

    python3 -m hpc_det.compat SCRIPT ARGS...         for one program and every Python process that it starts
    hpc_det.compat.install("determined", "ray")      for this process, from the call on
    HPC_DET_COMPAT=determined,ray                    for an experiment, among its environment_variables

The last two enable only the packages that they name, so `determined` alone leaves a real Ray importable.

`path/` and `path_ray/` are put first on the module search path. Their packages `determined` and `ray` contain the names
that exist only there; hpc_det.compat.aliases maps all other names to hpc_det. Torch and other large packages are
imported only when a program imports a name that needs them.
"""

from __future__ import annotations

import sys

from hpc_det.config.rank_variables import DETERMINED
from hpc_det.errors import UsageError
from hpc_det.resources import COMPAT_PATHS


def install(*packages: str) -> None:
    """Make imports of these packages import hpc_det in this process and in those that `multiprocessing` starts.

    Args:
        *packages: "determined", "ray" or both. None given: "determined".

    Raises:
        UsageError: A name is another one, or the real package is imported already.
    """
    names = packages or (DETERMINED,)
    if unknown := [name for name in names if name not in COMPAT_PATHS]:
        raise UsageError(f"hpc_det.compat.install: got {unknown[0]!r}; expected 'determined' or 'ray'")
    for name in names:
        path = str(COMPAT_PATHS[name])
        # Classes of the real package may be in use already, and would fail isinstance checks against hpc_det's classes.
        already = sys.modules.get(name)
        place = already and (already.__file__ or next(iter(already.__path__), ""))  # no file: a namespace package
        if place is not None and not place.startswith(path):
            raise UsageError(f"hpc_det.compat: {place} is already imported; call install() before importing it")
        if path not in sys.path:
            sys.path.insert(0, path)
