"""python3 -m hpc_det.compat [PYTHON_OPTIONS...] (SCRIPT | -m MODULE) ARGS...

Replaces itself by `python3` with these arguments, in which `import determined` imports hpc_det.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from hpc_det.config.rank_variables import with_compat


def main(argv: list[str]) -> NoReturn:
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        sys.exit(0 if argv else 2)
    os.execve(sys.executable, [sys.executable, *argv], with_compat(os.environ))


if __name__ == "__main__":
    main(sys.argv[1:])
