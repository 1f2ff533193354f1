"""The shipped examples, as `make demo` and the documentation run them."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score

from hpc_det.checkpoint.committed import committed
from hpc_det.checkpoint.content import load
from hpc_det.pytorch import load_trial_from_checkpoint_path
from tests.e2e.story import HERE, Story, hpc_det, warm_ranks_of
from tests.pytorch.conftest import _torch_ready

__all__ = ["_torch_ready"]  # a trial is loaded in this process, too

pytestmark = pytest.mark.usefixtures("warm")

PROJECT = Path(__file__).parents[2]
EXAMPLES = PROJECT / "docs" / "examples"
SEED = "reproducibility.experiment_seed=5"


def begin(example: str, *overrides: str, config: str | None = None) -> Story:
    """`config`: name of the experiment file without its suffix, if it is not that of the example."""
    file = EXAMPLES / example / f"{config or example}.yaml"
    return Story.begin(*overrides, config=file, context=EXAMPLES / example)


def newest_checkpoint(story: Story) -> Path:
    return max(committed(story.trial.checkpoints), key=lambda checkpoint: checkpoint.steps).path


def last_validation(story: Story) -> dict[str, float]:
    return [metrics for kind, _, metrics in story.series if kind == "validation"][-1]


# --- digits


def demo() -> list[str]:
    """Return the arguments of `hpc-det` in the Makefile's demo."""
    makefile = (PROJECT / "Makefile").read_text()
    (line,) = [line for line in makefile.splitlines() if line.startswith("\t$(BIN)/hpc-det ")]
    return line.split()[1:]


@pytest.mark.long
def test_the_demo_learns_the_digits_and_inference_reads_them_all_with_its_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(PROJECT)
    output = hpc_det(*demo(), "--config", SEED).stdout
    (listed,) = json.loads(hpc_det("experiment", "list", "--json").stdout)
    assert listed["state"] == "COMPLETED"
    assert listed["best"]["metric"] == "accuracy"
    assert listed["best"]["value"] > 0.97
    for named in ("Experiment 1: COMPLETED", "Best validation: accuracy ", "Checkpoint: /", "Next: hpc-det "):
        assert named in output
    (line,) = [line for line in output.splitlines() if line.startswith("Checkpoint: ")]
    assert_inference_reads_all(line.removeprefix("Checkpoint: ").rpartition(" (")[0])


def assert_inference_reads_all(checkpoint: str) -> None:
    """Check that two ranks classify each image once, with few errors."""
    infer = f"entrypoint=python3 {HERE / 'warm' / 'launcher.py'} infer.py"
    story = begin("batch_inference", infer, f"hyperparameters.checkpoint={checkpoint}", config="tiny")
    story.wait()
    read: list[str | Path] = [sys.executable, EXAMPLES / "batch_inference" / "read.py", story.trial.path]
    lines = [*csv.DictReader(subprocess.run(read, check=True, capture_output=True, text=True).stdout.splitlines())]
    digits = load_digits().target.tolist()
    assert [int(line["record"]) for line in lines] == [*range(len(digits))]
    correct = sum(int(line["digit"]) == digit for line, digit in zip(lines, digits, strict=True)) / len(digits)
    assert correct > 0.97
    assert last_validation(story)["accuracy"] == pytest.approx(correct)


# --- gan


WAITS = """
import os
import time
from pathlib import Path

from hpc_det.store.attempt import read_stop


class Waits(GanTrial):
    def train_batch(self, batch, epoch_idx, batch_idx):
        metrics = super().train_batch(batch, epoch_idx, batch_idx)
        if batch_idx >= 5 and os.environ["HPC_DET_NUMBER"] == "1":
            while not read_stop(Path(os.environ["HPC_DET_FOLDER"], "stop.json"), 1):
                time.sleep(0.05)
            time.sleep(0.5)
        return metrics
"""
"""The example's trial. After five batches it waits for the stop request, and a little longer, since ranks have to agree
on the stop.
"""


def gan(slots: int, trial: str = "GanTrial", context: Path = EXAMPLES / "gan") -> Story:
    options = ("searcher.max_length={batches: 400}", f"resources.slots_per_trial={slots}", "scheduling_unit=1", SEED)
    return Story.begin(warm_ranks_of(trial), *options, config=EXAMPLES / "gan" / "gan.yaml", context=context)


@pytest.mark.long
@pytest.mark.parametrize("slots", [1, 2])
def test_a_gan_with_two_optimizers_goes_on_bit_for_bit_after_a_preemption(slots: int, tmp_path: Path) -> None:
    undisturbed = gan(slots)
    undisturbed.wait()
    context = shutil.copytree(EXAMPLES / "gan", tmp_path / "gan")
    (context / "model_def.py").write_text((context / "model_def.py").read_text() + WAITS)
    story = gan(slots, "Waits", context)
    story.until_batch(5)
    (agent,) = story.pids("hpc_det.launch.agent")
    os.kill(agent, signal.SIGTERM)
    story.wait()
    assert story.causes == ["preempted", "finished"]
    assert story.same_as(undisturbed)
    generator, discriminator = load(newest_checkpoint(story) / "state_dict.pth")["optimizers_state_dict"]
    epochs = 400 * 128 // 4096
    assert generator["param_groups"][0]["lr"] == pytest.approx(0.0005 * 0.99**epochs)
    assert discriminator["param_groups"][0]["lr"] == pytest.approx(0.002 * 0.9 ** (400 // 100))


# --- roc_auc


@pytest.mark.long
def test_the_area_under_the_curve_is_that_of_all_records_together() -> None:
    story = begin("roc_auc", warm_ranks_of("TumourTrial"), "searcher.max_length={epochs: 4}", SEED)
    story.wait()
    reported = last_validation(story)
    trial: Any = load_trial_from_checkpoint_path(newest_checkpoint(story))
    measurements, malignant = trial.build_validation_data_loader().dataset.tensors
    with torch.no_grad():
        scores = trial.model.eval()(measurements)
    assert reported["roc_auc"] == pytest.approx(roc_auc_score(malignant, scores), abs=1e-6)
    assert reported["roc_auc"] > 0.97
    assert reported["sensitivity"] == pytest.approx((scores[malignant == 1] > 0).float().mean().item())
    assert reported["specificity"] == pytest.approx((scores[malignant == 0] < 0).float().mean().item())


# --- language_model


@pytest.mark.long
def test_the_language_model_learns_more_than_how_frequent_characters_are() -> None:
    short = ("searcher.max_length={batches: 120}", "resources.slots_per_trial=1")
    story = begin("language_model", warm_ranks_of("SonnetTrial"), *short, SEED)
    story.wait()
    assert last_validation(story)["perplexity"] < 10


@pytest.mark.long
@pytest.mark.parametrize("slots", [1, 2])
def test_the_same_model_learns_as_much_in_a_plain_loop(slots: int) -> None:
    short = ("searcher.max_length={batches: 120}", f"resources.slots_per_trial={slots}")
    story = begin("language_model", *short, SEED, config="plain_loop")
    story.wait()
    assert [steps for kind, steps, _ in story.series if kind == "validation"] == [100, 120]
    assert last_validation(story)["perplexity"] < 10


# --- plain_loop


@pytest.mark.integration
def test_a_plain_loop_learns_the_digits() -> None:
    story = begin("plain_loop", SEED)
    story.wait()
    assert [steps for kind, steps, _ in story.series if kind == "training"] == [*range(1, 116)]
    assert last_validation(story)["accuracy"] > 0.9
