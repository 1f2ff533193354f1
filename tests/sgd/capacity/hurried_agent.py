"""The node agent, but with little patience: it fails if it has not reached its driver within half a second.

python -m tests.sgd.capacity.hurried_agent RUN_FOLDER SLOTS
"""

from __future__ import annotations

import sys

from hpc_det.sgd.elastic import node

if __name__ == "__main__":
    node.MEET_S = 0.5
    sys.exit(node.main(sys.argv[1:]))
