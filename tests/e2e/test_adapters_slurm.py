"""The examples of training loops on a real Slurm: four ranks on two nodes, preempted twice, and the same to the bit."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch

from hpc_det.checkpoint.committed import committed, newest_steps
from tests.e2e.gallery import EXAMPLES, SEED, tiny_model
from tests.e2e.story import Story
from tests.e2e.test_slurm import use
from tests.labs.slurm import SlurmLab

pytestmark = [pytest.mark.slurm, pytest.mark.long]

FOUR_RANKS = ("resources.slots_per_trial=4", SEED)
LANGUAGE_MODEL: dict[str, Any] = {
    "context": EXAMPLES / "language_model",
    "overrides": ("searcher.max_length={batches: 200}", "hyperparameters.width=16"),
}
CASES: dict[str, dict[str, Any]] = {
    "plain loop": {**LANGUAGE_MODEL, "config": "plain_loop.yaml", "weights": "tracked.pth"},
    "Hugging Face": {
        "context": EXAMPLES / "hf_finetune",
        "config": "tiny.yaml",
        "weights": "model.safetensors",
        "overrides": ("searcher.max_length={batches: 200}",),
    },
    "Lightning": {
        "context": EXAMPLES / "lightning",
        "config": "lightning.yaml",
        "weights": "lightning.ckpt",
        "overrides": ("searcher.max_length={epochs: 8}",),
    },
}


def begin(case: dict[str, Any]) -> Story:
    return Story.begin(
        *FOUR_RANKS, *case["overrides"], cluster="lab", config=case["context"] / case["config"], context=case["context"]
    )


def digests(story: Story) -> dict[str, str]:
    """Return a digest of the weights in the newest checkpoint, by file."""
    newest = max(committed(story.trial.checkpoints), key=lambda checkpoint: checkpoint.steps)
    found = {}
    for path in newest.path.iterdir():
        if path.suffix == ".ckpt":  # Lightning's file has counters of this process, too
            weights = torch.load(path, weights_only=True)["state_dict"]
            found[path.name] = hashlib.sha1(repr({k: v.tolist() for k, v in weights.items()}).encode()).hexdigest()
        elif path.suffix == ".safetensors" or path.name == "tracked.pth":
            found[path.name] = hashlib.sha1(path.read_bytes()).hexdigest()
    return found


@pytest.mark.parametrize("name", CASES)
def test_an_example_on_two_nodes_is_preempted_twice_and_the_same(
    slurm_lab: SlurmLab, state_folder: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    use(slurm_lab, monkeypatch)
    case = CASES[name]
    if name == "Hugging Face":
        case = {**case, "overrides": (*case["overrides"], tiny_model(slurm_lab.folder() / "model"))}
    whole = begin(case)
    whole.wait()
    story = begin(case)
    for preemptions in (1, 2):
        saved = newest_steps(story.trial.checkpoints)
        story.until_batch(saved + 5)
        slurm_lab.preempt(3, seconds=2)
        story.until_ended(preemptions)
    story.wait()
    assert story.causes == ["preempted", "preempted", "finished"]
    assert story.series == whole.series
    assert digests(story) == digests(whole)
    assert digests(story)
