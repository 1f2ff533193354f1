"""The shipped examples, as `make demo` and the documentation run them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.e2e.story import Story, hpc_det

PROJECT = Path(__file__).parents[2]
GAN = PROJECT / "docs" / "examples" / "gan"


def demo() -> list[str]:
    """The arguments of `hpc-det` in the Makefile's demo."""
    makefile = (PROJECT / "Makefile").read_text()
    (line,) = [line for line in makefile.splitlines() if line.startswith("\t$(BIN)/hpc-det ")]
    return line.split()[1:]


def test_the_demo_learns_the_digits_and_says_where_everything_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROJECT)
    said = hpc_det(*demo()).stdout
    (listed,) = json.loads(hpc_det("experiment", "list", "--json").stdout)
    assert listed["state"] == "COMPLETED"
    assert listed["best"]["metric"] == "accuracy"
    assert listed["best"]["value"] > 0.97
    for named in ("Experiment 1: COMPLETED", "Best validation: accuracy ", "Checkpoint: /", "Next: hpc-det "):
        assert named in said


def gan() -> Story:
    overrides = ("searcher.max_length={batches: 400}", "scheduling_unit=1", "reproducibility.experiment_seed=5")
    return Story.begin(*overrides, config=GAN / "gan.yaml", context=GAN)


def test_a_gan_with_two_optimizers_goes_on_bit_for_bit_after_a_preemption() -> None:
    undisturbed = gan()
    undisturbed.wait()
    story = gan()
    story.until_batch(5)
    (agent,) = story.pids("hpc_det.launch.agent")
    os.kill(agent, signal.SIGTERM)
    story.wait()
    assert story.causes == ["preempted", "finished"]
    assert story.same_as(undisturbed)
