"""Commands with a thousand experiments are about as fast as with ten."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from hpc_det.view.experiments import SETTLES_S
from tests.benchmarks.command_line import HPC_DET
from tests.benchmarks.many import seconds
from tests.cli.many import make_world

ROUNDS = 5


@pytest.mark.long
def test_a_list_of_a_thousand_takes_little_longer_than_a_command_that_does_nothing(root: Path) -> None:
    """Measured CPU time: about 0.1 s for --version, less than 0.5 s for the list."""
    make_world(root)
    time.sleep(SETTLES_S)  # younger entries of the index are not used
    rows = subprocess.check_output([HPC_DET, "experiment", "list"], text=True).splitlines()
    assert len(rows) == 1001
    assert sum(" COMPLETED " in line for line in rows) == 995
    rounds = [(seconds(("--version",)), seconds(("experiment", "list"))) for _ in range(ROUNDS)]
    assert min(listed / nothing for nothing, listed in rounds) < 5, rounds
