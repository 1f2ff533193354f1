"""`python -m hpc_det`: the command line, where the script `hpc-det` is not on PATH."""

from __future__ import annotations

import sys

from hpc_det.cli.main import main

if __name__ == "__main__":
    sys.exit(main(program="python -m hpc_det"))
