"""The same as `hpc_det.launch.horovod --autohorovod`, under Determined's name for it.

python3 -m hpc_det.launch.autohorovod [[HVD_OVERRIDES...] --] (--trial module:Class | SCRIPT ARGS...)
"""

from __future__ import annotations

import sys

from hpc_det.launch.horovod import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], is_auto=True, about=__doc__))
