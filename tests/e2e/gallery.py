"""Helpers of the tests of the example gallery: its experiments, and the tiny model of those for language models."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.e2e.story import Story

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
SEED = "reproducibility.experiment_seed=5"


def begin(example: str, *overrides: str, cluster: str = "local") -> Story:
    """Begin the tiny experiment of an example."""
    folder = EXAMPLES / example
    return Story.begin(SEED, *overrides, config=folder / "tiny.yaml", context=folder, cluster=cluster)


def finished(example: str, *overrides: str) -> Story:
    story = begin(example, *overrides)
    story.wait()
    return story


def tiny_model(folder: Path) -> str:
    """Write the model into `folder` and return the override with it."""
    script = EXAMPLES / "hf_finetune" / "tiny_model.py"
    subprocess.run([sys.executable, script, folder], check=True, capture_output=True, env=os.environ)
    return f"hyperparameters.model={folder}"


def values(story: Story, kind: str, metric: str) -> list[float]:
    """Return the reported values of a metric, in order. `kind`: training or validation."""
    return [metrics[metric] for reported, _, metrics in story.series if reported == kind and metric in metrics]
