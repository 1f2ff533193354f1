"""An unmodified Determined trial with its experiment file, run by the real command line."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from hpc_det.checkpoint.committed import committed
from tests.compat.programs import printed
from tests.e2e.conftest import warm
from tests.e2e.forked import WithTorch, _fork_server, hpc_det_with_torch
from tests.e2e.story import Story, hpc_det, warm_ranks_of
from tests.facts import unnamed

__all__ = ["_fork_server", "hpc_det_with_torch", "warm"]

TRIAL = Path(__file__).with_name("trial")
EXPERIMENT = TRIAL / "distributed.yaml"
ONE_SLOT = "resources.slots_per_trial=1"
WARM = (warm_ranks_of("DigitsTrial"), "environment.environment_variables=[HPC_DET_COMPAT=determined]")


def best(story: Story, metric: str) -> float:
    return max(metrics[metric] for kind, _, metrics in story.series if kind == "validation")


def test_nothing_that_was_written_for_determined_names_hpc_det() -> None:
    code = [path.read_text().splitlines()[4:] for path in TRIAL.glob("*.*")]
    assert [line for lines in code for line in lines if "hpc_det" in line] == []


@pytest.mark.long
@pytest.mark.integration
def test_an_unmodified_trial_trains_on_two_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = ["--config", "reproducibility.experiment_seed=6"]
    said = hpc_det("experiment", "create", EXPERIMENT, TRIAL, "--cluster", "local", *seed, "--follow").stdout
    story = Story.of(1)
    assert not unnamed(said, "Experiment 1", "COMPLETED", "138 batches")
    assert best(story, "accuracy") > 0.95
    assert min(best(story, f"accuracy_{digit}") for digit in range(10)) > 0.8
    assert "trial 1 of experiment 1" in story.trial.rank_log(1, 0).read_text()
    (newest, *_) = committed(story.trial.checkpoints)
    assert (newest.path / "diary.txt").read_text() == "6 epochs\n"
    monkeypatch.chdir(tmp_path)  # load_trial_from_checkpoint_path builds the trial, which downloads its data here
    load = f"from determined import pytorch; trial = pytorch.load_trial_from_checkpoint_path({str(newest.path)!r})"
    assert printed(f"{load}; print(trial.model[0].out_channels)") == "8"


def test_an_unmodified_trial_runs_in_one_process_without_a_job(hpc_det_with_torch: WithTorch, tmp_path: Path) -> None:
    shutil.copytree(TRIAL, tmp_path / "trial")
    said = hpc_det_with_torch("experiment", "create", EXPERIMENT, tmp_path / "trial", "--local", "--test").stdout
    assert not unnamed(said.splitlines()[-1], "One batch")


def short(*entrypoint: str) -> Story:
    overrides = ["searcher.max_length={batches: 3}", "reproducibility.experiment_seed=5", ONE_SLOT]
    story = Story.begin(*overrides, *entrypoint, config=EXPERIMENT, context=TRIAL)
    story.wait()
    return story


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    "entrypoint",
    [
        "bash -c 'python3 -m determined.launch.torch_distributed --trial model_def:DigitsTrial'",
        pytest.param(
            "python3 -m determined.launch.torch_distributed --trial model_def:DigitsTrial", marks=pytest.mark.long
        ),
        pytest.param("model_def:DigitsTrial", marks=pytest.mark.long),
        pytest.param(
            "python3 -m hpc_det.launch.torch_distributed --trial model_def:DigitsTrial", marks=pytest.mark.long
        ),
    ],
)
def test_every_entrypoint_of_a_ported_trial_leads_to_the_same_weights(entrypoint: str) -> None:
    assert short(f"entrypoint={entrypoint}").same_as(short(*WARM))


@pytest.mark.usefixtures("warm")
def test_a_search_point_that_a_trial_calls_invalid_is_no_reason_to_start_again() -> None:
    story = Story.begin(*WARM, ONE_SLOT, "hyperparameters.n_filters1=32", config=EXPERIMENT, context=TRIAL)
    story.wait(check=False)
    assert len(story.causes) == 1
    assert "a later layer must not be narrower" in story.logged


@pytest.mark.integration
def test_the_effective_configuration_says_what_determined_means() -> None:
    said = hpc_det("experiment", "create", EXPERIMENT, TRIAL, "--dry-run", "--explain").stdout
    assert re.search(r'environment_variables\[0\]: "HPC_DET_COMPAT=determined" +\(entrypoint\)', said)
