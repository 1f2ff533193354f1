"""Support for model files written for Determined: `import determined` imports hpc_det's own classes.

It is enabled in one of three ways:

    python3 -m hpc_det.compat SCRIPT ARGS...     for one program and every Python process that it starts
    hpc_det.compat.install()                     for this process, from the call on
    HPC_DET_COMPAT=determined                    for an experiment, among its environment_variables

`path/` is put first on the module search path. Its package `determined` contains the names that exist only in
Determined; hpc_det.compat.aliases maps all other names to hpc_det. Torch and other large packages are imported only
when a model file imports a name that needs them.
"""

from __future__ import annotations

import sys

from hpc_det.config.rank_variables import DETERMINED
from hpc_det.errors import UsageError
from hpc_det.resources import COMPAT_PATH

_PATH = str(COMPAT_PATH)


def install() -> None:
    """Make `import determined` import hpc_det in this process and in those that `multiprocessing` starts.

    Raises UsageError if another package `determined` is imported already.
    """
    # Classes of the real package may be in use already, and would fail isinstance checks against hpc_det's classes.
    already = sys.modules.get(DETERMINED)
    if already and not str(already.__file__).startswith(_PATH):
        raise UsageError(f"hpc_det.compat: {already.__file__} is already imported; call install() before importing it")
    if _PATH not in sys.path:
        sys.path.insert(0, _PATH)
