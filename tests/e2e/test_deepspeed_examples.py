"""The shipped examples of DeepSpeedTrial, on real ranks that DeepSpeed's launcher has started."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from tests.e2e.story import Story

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
SEED = "reproducibility.experiment_seed=5"


def finished(example: str, *overrides: str, experiment: str | None = None) -> Story:
    folder = EXAMPLES / example
    story = Story.begin(SEED, *overrides, config=folder / f"{experiment or example}.yaml", context=folder)
    story.wait()
    return story


def reported(story: Story, kind: str, metric: str) -> list[float]:
    return [metrics[metric] for which, _, metrics in story.series if which == kind]


# --- deepspeed


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_learns_the_digits(stage: int) -> None:
    story = finished(
        "deepspeed",
        f"hyperparameters.overwrite_deepspeed_args.zero_optimization.stage={stage}",
        "searcher.max_length={epochs: 6}",
    )
    losses = reported(story, "training", "loss")
    assert losses[-1] < losses[0] / 4
    assert reported(story, "validation", "accuracy")[-1] > 0.95
