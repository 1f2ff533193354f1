from __future__ import annotations

from pathlib import Path

import pytest

from hpc_det import client
from hpc_det.client import Checkpoint
from tests.cli.conftest import code as code
from tests.cli.conftest import config as config
from tests.cli.conftest import hpc_det as hpc_det
from tests.cli.conftest import life as life
from tests.cli.conftest import root as root
from tests.cli.conftest import scheduler as scheduler
from tests.cli.conftest import slurm_commands as slurm_commands
from tests.cli.conftest import umask as umask
from tests.cli.life import Life, random_search


@pytest.fixture
def searched(root: Path) -> Life:
    """Return experiment 1, which has finished: two trials with checkpoints at 100 and 400 batches each."""
    life = Life.submitted(root, **random_search(2))
    life.begins()
    for trial, values in ((1, (0.9, 0.8)), (2, (0.7, 0.95))):
        for steps, accuracy in zip((100, 400), values, strict=True):
            life.reports("training", steps, {"loss": steps / 100}, trial=trial)
            life.reports("validation", steps, {"accuracy": accuracy, "error": 1 - accuracy}, trial=trial)
            life.saves(steps, trial=trial)
        life.reaches(max(values))
    return life


@pytest.fixture
def top(searched: Life) -> Checkpoint:
    """Return the best checkpoint of experiment 1: of trial 2, at 400 batches."""
    found = client.get(1).top_checkpoint()
    assert found
    return found
