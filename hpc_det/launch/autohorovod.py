"""hpc_det.launch.horovod --autohorovod under upstream's name: python3 -m hpc_det.launch.autohorovod ..."""

from __future__ import annotations

import sys

from hpc_det.launch.horovod import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], is_auto=True))
