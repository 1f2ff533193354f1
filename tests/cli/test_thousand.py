"""A thousand experiments are as pleasant as ten."""

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
    """In seconds of a processor: about 0.1 for nothing, and under 0.5 for the list."""
    make_world(root)
    time.sleep(SETTLES_S)  # what is younger is not believed
    told = subprocess.check_output([HPC_DET, "experiment", "list"], text=True).splitlines()
    assert len(told) == 1001
    assert sum(" COMPLETED " in line for line in told) == 995
    rounds = [(seconds(("--version",)), seconds(("experiment", "list"))) for _ in range(ROUNDS)]
    assert min(listed / nothing for nothing, listed in rounds) < 5, rounds
