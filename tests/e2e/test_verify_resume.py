"""A trial is stopped and resumed for real, and what its checkpoints miss is named."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hpc_det.store.experiments import ExperimentStore
from tests.e2e.story import HERE, hpc_det, warm_ranks_of
from tests.e2e.test_slurm import use
from tests.lab.slurm import SlurmLab

FOLDER = HERE / "verify_resume"
WARM = warm_ranks_of("LeakyTrial")


def verified(leak: str, *arguments: object) -> tuple[int, dict[str, Any]]:
    """The exit code, and what was found. Nothing is left of the trainings."""
    leaks = f"hyperparameters.leak={leak}"
    command = ("experiment", "verify-resume", FOLDER / "leaky.yaml", FOLDER, "--json", "--config", leaks, *arguments)
    done = hpc_det(*command, check=False)
    assert list(ExperimentStore(Path(os.environ["HPC_DET_ROOT"])).all()) == [], done.stderr
    return done.returncode, json.loads(done.stdout)


def lost_names(found: dict[str, Any]) -> set[str]:
    return {each["name"] for each in found["not_in_checkpoints"]}


@pytest.mark.usefixtures("warm")
def test_a_sound_trial_is_the_same_after_each_stop_and_what_it_keeps_for_itself_is_named() -> None:
    code, found = verified("none", "--config", WARM, "--ranks", 2, "--batches", 20, "--stops", 3, "--seed", 1)
    assert code == 0
    assert found["identical"]
    assert found["first_differences"] == []
    assert found["batches"] == 20
    assert found["resumes"] == [3, 5, 9]
    assert lost_names(found) == {"attribute trial.average"}, "which nothing depends on"


LEAKS = {
    "generator": ("metrics", {"attribute trial.generator"}),
    "counter": ("metrics", {"attribute trial.count"}),
    "average": ("validation", set[str]()),
    "global": ("metrics", {"global variable model_def.batches"}),
    "optimizer": ("metrics", {"attribute trial.scale (a module that is not wrapped)['weight']"}),
    "data set": ("data", {"attribute training data loader.dataset.noise"}),
}
"""What differs first, and what beside `trial.average` the resume has lost."""


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("leak", LEAKS)
def test_state_that_no_checkpoint_holds_is_named(leak: str) -> None:
    code, found = verified(leak, "--config", WARM, "--batches", 8, "--stops", 1, "--seed", 2)
    part, names = LEAKS[leak]
    assert code == 1
    (resumed,) = found["resumes"]
    (first,) = found["first_differences"]
    assert first["part"] == part
    assert first["batch"] == (2 if part == "validation" else resumed)
    assert {"attribute trial.average", *names} <= lost_names(found)
    assert any(name.partition(" (")[0] in cause["what"] for name in names for cause in found["causes"]) or not names


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(("leak", "part"), [("time", "metrics"), ("unseeded", "data")])
def test_a_training_that_differs_without_any_stop_is_not_blamed_on_the_resume(leak: str, part: str) -> None:
    code, found = verified(leak, "--config", WARM, "--batches", 4, "--stops", 0)
    assert code == 1
    assert found["resumes"] == []
    first = found["first_differences"][0]
    assert (first["batch"], first["part"]) == (0, part)
    assert len(found["causes"]) == 1


@pytest.mark.slurm
def test_a_leak_is_named_by_trainings_on_a_real_slurm(
    slurm_lab: SlurmLab, state_folder: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(slurm_lab, monkeypatch)
    code, found = verified("counter", "--cluster", "lab", "--ranks", 4, "--batches", 8, "--stops", 1)
    assert code == 1
    assert {each["rank"] for each in found["first_differences"]} == {0, 1, 2, 3}
    assert "attribute trial.count" in lost_names(found)
