"""Real trials are stopped and resumed; the state that their checkpoints lack is named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hpc_det.store.experiments import ExperimentStore
from tests.e2e.story import COMMAND, HERE, hpc_det, warm_ranks_of
from tests.e2e.test_pbs import PROFILE as PBS_PROFILE
from tests.e2e.test_slurm import use
from tests.labs.pbs_fixture import pbs_lab as pbs_lab
from tests.labs.pbs_lab import PbsLab
from tests.labs.slurm import SlurmLab
from tests.wait import DEADLINE_S, wait_for

FOLDER = HERE / "verify_resume"
CHECKOUT = HERE.parents[1]
EXAMPLES = CHECKOUT / "docs" / "examples"
WARM = ("--config", warm_ranks_of("LeakyTrial"))
SHORT = ("--batches", 8, "--stops", 2, "--seed", 2)
COUNTER, NOTHING = "hyperparameters.leak=counter", "hyperparameters.leak=none"
LEAKS = {"generator": "generator", "average": "state"}
"""The kind of cause that is reported for state in an attribute of the trial."""


def experiments() -> list[int]:
    return [each.id for each in ExperimentStore(Path(os.environ["HPC_DET_ROOT"])).all()]


def verified(
    *arguments: object, config: Path = FOLDER / "leaky.yaml", code: Path | None = None
) -> tuple[int, dict[str, Any]]:
    """Return the exit code and the result. No experiment remains."""
    done = hpc_det("experiment", "verify-resume", config, code or config.parent, "--json", *arguments, check=False)
    assert experiments() == [], done.stderr
    return done.returncode, json.loads(done.stdout)


def blamed(found: dict[str, Any]) -> set[tuple[str, str]]:
    return {(cause["kind"], cause["name"]) for cause in found["causes"]}


@pytest.mark.long
@pytest.mark.usefixtures("warm")
def test_a_sound_trial_is_the_same_after_each_stop_and_what_it_keeps_for_itself_is_named() -> None:
    """Checkpoints are also disabled, except those of the stops."""
    none = ("--config", "checkpoint_policy=none")
    code, found = verified(*WARM, *none, "--ranks", 2, "--batches", 20, "--stops", 3, "--seed", 1)
    assert code == 0
    assert found["identical"]
    assert found["batches"] == 20
    assert len(found["resumes"]) == 3
    assert {each["name"] for each in found["not_in_checkpoints"]} == {"attribute trial.average"}


@pytest.mark.long
@pytest.mark.usefixtures("warm")
def test_state_that_ends_with_the_process_is_named() -> None:
    code, found = verified(*WARM, *SHORT, "--config", "hyperparameters.leak=global")
    assert code == 1
    assert len(found["resumes"]) == 2
    first = found["first_differences"][0]
    assert (first["part"], first["batch"]) == ("metrics", found["resumes"][0])
    assert ("state", "global variable model_def.batches") in blamed(found)


@pytest.mark.long
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("leak", LEAKS)
def test_a_generator_and_an_average_in_an_attribute_are_named(leak: str) -> None:
    code, found = verified(*WARM, *SHORT, "--ranks", 2, "--config", f"hyperparameters.leak={leak}")
    assert_leak_is_named(leak, code, found, ranks=2)


def assert_leak_is_named(leak: str, code: int, found: dict[str, Any], *, ranks: int) -> None:
    """Check that the training differs from the first batch after the first stop, on each rank."""
    assert (code, found["identical"]) == (1, False)
    assert len(found["resumes"]) == 2
    firsts = [each for each in found["first_differences"] if each["batch"] == found["resumes"][0]]
    assert {each["rank"] for each in firsts} == set(range(ranks))
    assert (LEAKS[leak], f"attribute trial.{leak}") in blamed(found)


@pytest.mark.usefixtures("warm")
def test_a_trial_that_cannot_be_resumed_fails_with_its_own_error() -> None:
    leak = ("--config", "hyperparameters.leak=failure")
    done = hpc_det("experiment", "verify-resume", FOLDER / "leaky.yaml", FOLDER, *WARM, *SHORT, *leak, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "ValueError: nobody has tried that" in done.stderr
    assert experiments() == [2], "it stays for its logs"


@pytest.mark.long
@pytest.mark.parametrize(("leak", "code"), [(NOTHING, 0), (COUNTER, 1)])
def test_a_script_with_a_trainer_trains_as_short(leak: str, code: int) -> None:
    script = ("--config", "entrypoint=python3 -m hpc_det.launch.direct train.py")
    found_code, found = verified(*script, *SHORT, "--config", leak)
    assert found_code == code
    assert found["batches"] == 8
    assert (("state", "attribute trial.count") in blamed(found)) == bool(code)


@pytest.mark.long
def test_a_script_with_a_loop_on_the_core_api_is_sound() -> None:
    """Its variable `seen` is tracked, and its search asks for the length of the check."""
    folder = HERE / "core"
    code, found = verified("--ranks", 2, "--batches", 16, "--stops", 2, config=folder / "plain.yaml")
    assert code == 0
    assert (found["batches"], len(found["resumes"]), found["stops_without_checkpoint"]) == (16, 2, [])
    assert found["causes"] == []


LEAKY_LOOP = """
import torch
from torch.utils.data import DataLoader
import hpc_det.core

def main():
    with hpc_det.core.init() as core:
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        core.track(model=model, optimizer=optimizer)
        average = 0.0
        for inputs in core.batches(DataLoader(torch.randn(400, 4), batch_size=4, shuffle=True)):
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            average = 0.9 * average + 0.1 * loss.item()
            core.report(core.step, {"loss": average})

main()
"""


@pytest.mark.long
@pytest.mark.integration
def test_a_variable_of_a_script_that_a_resume_loses_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LEAKY_LOOP)
    config = (HERE / "core" / "plain.yaml").read_text()
    (tmp_path / "plain.yaml").write_text(config)
    code, found = verified("--batches", 6, "--stops", 1, config=tmp_path / "plain.yaml")
    assert code == 1
    assert (found["batches"], found["first_differences"][0]["part"]) == (6, "metrics")
    assert blamed(found) == {("state", "variable main.average")}


# --- the examples


@pytest.mark.long
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("example", "trial"),
    [("digits", "DigitsTrial"), ("gan", "GanTrial"), ("language_model", "SonnetTrial"), ("roc_auc", "TumourTrial")],
)
def test_the_examples_are_sound(example: str, trial: str, ranks: int) -> None:
    folder = CHECKOUT / "conf" / "experiment" if example == "digits" else EXAMPLES / example
    arguments = ("--batches", 12, "--ranks", ranks, "--config", warm_ranks_of(trial))
    code, found = verified(*arguments, config=folder / f"{example}.yaml", code=EXAMPLES / example)
    assert code == 0
    assert found["causes"] == []


LEAKY_ENGINE = """
import model_def

class Leaky(model_def.DigitsTrial):
    count = 0
    def train_batch(self, *arguments):
        self.count += 1
        return {**super().train_batch(*arguments), "count": self.count}
"""


@pytest.mark.long
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(("trial", "code"), [("model_def:DigitsTrial", 0), ("leaky:Leaky", 1)])
def test_an_engine_is_sound_and_a_leak_beside_it_is_named(stage: int, trial: str, code: int, tmp_path: Path) -> None:
    for file in (EXAMPLES / "deepspeed").iterdir():
        if file.is_file():
            (tmp_path / file.name).write_text(file.read_text())
    (tmp_path / "leaky.py").write_text(LEAKY_ENGINE)
    found_code, found = verified(
        *("--batches", 10, "--stops", 1),
        *("--config", warm_ranks_of("DigitsTrial").replace("model_def:DigitsTrial", trial)),
        *("--config", f"hyperparameters.overwrite_deepspeed_args.zero_optimization.stage={stage}"),
        config=tmp_path / "deepspeed.yaml",
    )
    assert found_code == code
    assert blamed(found) == ({("state", "attribute trial.count")} if code else set())


@pytest.mark.long
@pytest.mark.usefixtures("warm")
def test_a_pipeline_is_sound() -> None:
    trial = ("--config", warm_ranks_of("PipelineTrial"))
    config = EXAMPLES / "deepspeed_pipeline" / "deepspeed_pipeline.yaml"
    code, found = verified(*trial, "--batches", 10, "--stops", 2, config=config)
    assert code == 0
    assert found["causes"] == []


# --- on a cluster


@pytest.mark.long
@pytest.mark.slurm
def test_a_leak_is_named_by_trainings_on_a_real_slurm(
    slurm_lab: SlurmLab, state_folder: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(slurm_lab, monkeypatch)
    code, found = verified("--cluster", "lab", "--ranks", 4, *SHORT, "--config", COUNTER)
    assert code == 1
    assert {each["rank"] for each in found["first_differences"]} == {0, 1, 2, 3}
    assert blamed(found) >= {("state", "attribute trial.count")}


@pytest.mark.long
@pytest.mark.slurm
def test_a_sound_trial_passes_and_each_leak_is_named_on_a_real_slurm(
    slurm_lab: SlurmLab, state_folder: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(slurm_lab, monkeypatch)
    on_the_lab = ("--cluster", "lab", "--ranks", 2, *SHORT)
    code, found = verified(*on_the_lab, "--config", NOTHING)
    assert (code, found["identical"]) == (0, True)
    assert len(found["resumes"]) == 2
    for leak in LEAKS:
        code, found = verified(*on_the_lab, "--config", f"hyperparameters.leak={leak}")
        assert_leak_is_named(leak, code, found, ranks=2)


@pytest.mark.long
def test_a_leak_is_named_by_trainings_on_pbs(pbs_lab: PbsLab, state_folder: Path) -> None:
    write_pbs_profile(state_folder)
    code, found = verified("--cluster", "lab", "--ranks", 2, *SHORT, "--config", COUNTER)
    assert code == 1
    assert {each["rank"] for each in found["first_differences"]} == {0, 1}
    assert blamed(found) >= {("state", "attribute trial.count")}


@pytest.mark.long
def test_ctrl_c_on_pbs_cancels_both_jobs_and_leaves_nothing(pbs_lab: PbsLab, state_folder: Path) -> None:
    write_pbs_profile(state_folder)
    interrupted(["--ranks", "2"])
    assert pbs_lab.run("qselect") == ""


def interrupted(arguments: list[str]) -> None:
    """Press Ctrl-C when both trainings have jobs; the trainings are long enough for that."""
    command = [COMMAND, "experiment", "verify-resume", FOLDER / "leaky.yaml", FOLDER, "--cluster", "lab"]
    options = [
        "--batches",
        "100000",
        "--config",
        NOTHING,
        "--config",
        "hyperparameters.global_batch_size=6",
        *arguments,
    ]
    with subprocess.Popen([*map(str, command), *options], stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_for(lambda: submitted() == 2 or process.poll() is not None, DEADLINE_S)
            process.send_signal(signal.SIGINT)
            _, output = process.communicate(timeout=DEADLINE_S)
        finally:
            process.kill()
    assert process.returncode == 130, output
    assert experiments() == [], output


def submitted() -> int:
    """Return how many experiments have a job."""
    return sum(folder.job(1).exists() for folder in ExperimentStore(Path(os.environ["HPC_DET_ROOT"])).folders())


def write_pbs_profile(state_folder: Path) -> None:
    profile = state_folder / "conf" / "cluster" / "lab.yaml"
    profile.parent.mkdir(parents=True)
    profile.write_text(PBS_PROFILE.format(queue="low", repository=CHECKOUT, starter="pbsdsh"))
