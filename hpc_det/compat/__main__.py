"""python3 -m hpc_det.compat [PYTHON_OPTIONS...] (SCRIPT | -m MODULE) ARGS...

Replaces itself by `python3` with these arguments, in which `import determined` imports hpc_det.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from hpc_det.compat import for_children


def main(argv: list[str]) -> NoReturn:
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        sys.exit(0 if argv else 2)
    os.execve(sys.executable, [sys.executable, *argv], for_children(os.environ))


if __name__ == "__main__":
    main(sys.argv[1:])
