"""Install the kills in each Python process of an experiment whose profile has this folder on PYTHONPATH."""

import os
from pathlib import Path

if folder := os.environ.get("HPC_DET_TEST_KILLS"):
    from tests.chaos.kills.moments import install

    install(Path(folder))
