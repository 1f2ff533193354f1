"""python3 -m hpc_det.compat [PYTHON_OPTIONS...] (SCRIPT | -m MODULE) ARGS...

Replaces itself by `python3` with these arguments, in which `import determined` and `import ray` import hpc_det.
A Ray that is installed stays what `import ray` imports, unless HPC_DET_COMPAT=ray or HPC_DET_COMPAT=determined,ray is
set.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from typing import NoReturn

from hpc_det.config.rank_variables import COMPAT, DETERMINED, RAY, compat_packages, with_compat
from hpc_det.resources import COMPAT_PATHS


def main(argv: list[str]) -> NoReturn:
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        sys.exit(0 if argv else 2)
    os.execve(sys.executable, [sys.executable, *argv], with_compat(os.environ, _packages()))


def _packages() -> list[str]:
    """Return the packages that HPC_DET_COMPAT names; without it both, but Ray only if no real Ray is installed."""
    if named := compat_packages(os.environ):
        return named
    own = str(COMPAT_PATHS[RAY])  # on the path already in a program of another `python3 -m hpc_det.compat`
    real = PathFinder.find_spec(RAY, [folder for folder in sys.path if folder != own])
    if not real or not real.origin:  # without an origin it is a folder of that name without an `__init__.py`
        return [DETERMINED, RAY]
    print(
        f"hpc-det: `ray` is {real.origin} in this process; for code written for ray.util.sgd set {COMPAT}={RAY}",
        file=sys.stderr,
    )
    return [DETERMINED]


if __name__ == "__main__":
    main(sys.argv[1:])
