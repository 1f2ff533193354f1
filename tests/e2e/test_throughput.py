"""Real trainings of a trial find its bottleneck."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hpc_det.store.experiments import ExperimentStore
from tests.e2e.story import hpc_det, warm_ranks_of
from tests.e2e.test_slurm import use
from tests.facts import unnamed
from tests.labs.slurm import SlurmLab

HERE = Path(__file__).parent / "throughput"


def tuned(*arguments: object) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Return the tests by name, and the texts of the findings by subject. No experiment remains."""
    done = hpc_det("experiment", "tune-throughput", HERE / "timed.yaml", HERE, "--batches", 10, "--json", *arguments)
    found = json.loads(done.stdout)
    assert list(ExperimentStore(Path(os.environ["HPC_DET_ROOT"])).all()) == [], done.stderr
    return {test["test"]: test for test in found["tests"]}, {one["about"]: one["text"] for one in found["findings"]}


@pytest.mark.long
@pytest.mark.usefixtures("warm")
def test_a_loader_that_sleeps_is_what_limits_a_trial_and_the_largest_batch_that_fits_is_found() -> None:
    tests, shown = tuned("--config", warm_ranks_of("TimedTrial"))
    assert shown["verdict"].startswith("data loader bound: ")
    assert tests["the first batch over and over"]["ratio"] > 2, "0.02 s of 0.12 s a batch are training"
    assert not unnamed(shown["batch size"], 8, "memory", 16)
    assert tests["batches of 16"]["out_of_memory"]


@pytest.mark.slurm
@pytest.mark.long
def test_slots_of_a_real_slurm_are_compared_side_by_side(
    slurm_lab: SlurmLab, state_folder: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(slurm_lab, monkeypatch)
    slots = "resources.slots_per_trial=2"
    tests, shown = tuned("--cluster", "lab", "--config", slots, "--config", "hyperparameters.fits=4", "--max-slots", 4)
    assert [test["slots"] for test in tests.values()] == [2, 2, 2, 1, 4, 2, 2]
    assert tests["on 4 slots"]["efficiency"] > 0.3
    assert shown["verdict"].startswith("data loader bound: ")
    assert not unnamed(shown["batch size"], 8, "memory", 16)
