"""The shipped examples of DeepSpeedTrial, on real ranks, most of them started by DeepSpeed's launcher."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from tests.e2e.story import Story, warm_ranks_of

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def begin(example: str, *overrides: str, experiment: str | None = None, cluster: str = "local") -> Story:
    folder = EXAMPLES / example
    config = folder / f"{experiment or example}.yaml"
    return Story.begin("reproducibility.experiment_seed=5", *overrides, config=config, context=folder, cluster=cluster)


def finished(example: str, *overrides: str, cluster: str = "local") -> Story:
    story = begin(example, *overrides, cluster=cluster)
    story.wait()
    return story


def reported(story: Story, kind: str, metric: str) -> list[float]:
    return [metrics[metric] for reported, _, metrics in story.series if reported == kind]


# --- deepspeed


def with_zero(stage: int) -> Story:
    return finished(
        "deepspeed",
        f"hyperparameters.overwrite_deepspeed_args.zero_optimization.stage={stage}",
        "searcher.max_length={epochs: 6}",
    )


def assert_digits_are_learned(story: Story) -> None:
    losses = reported(story, "training", "loss")
    assert losses[-1] < losses[0] / 4
    assert reported(story, "validation", "accuracy")[-1] > 0.9


@pytest.mark.long
@pytest.mark.integration
def test_zero_1_learns_the_digits() -> None:
    assert_digits_are_learned(with_zero(1))


@pytest.mark.long
def test_zero_2_learns_the_digits_as_zero_1_does() -> None:
    two = with_zero(2)
    assert_digits_are_learned(two)
    assert reported(two, "training", "loss") == pytest.approx(reported(with_zero(1), "training", "loss"), rel=1e-3)


@pytest.mark.long
def test_a_search_changes_what_stands_in_the_deepspeed_config() -> None:
    story = begin("deepspeed", experiment="search")
    story.wait()
    trials = story.describe()["trials"]
    arguments = [trial["hyperparameters"]["overwrite_deepspeed_args"] for trial in trials]
    assert {each["gradient_accumulation_steps"] for each in arguments} == {1, 2}
    assert len({each["optimizer"]["params"]["lr"] for each in arguments}) == 4
    assert len({trial["best"]["value"] for trial in trials}) > 1


# --- deepspeed_pipeline


SHORT = "searcher.max_length={epochs: 4}"


@pytest.mark.long
@pytest.mark.usefixtures("warm")
def test_a_pipeline_of_two_stages_learns_the_digits() -> None:
    story = finished("deepspeed_pipeline", warm_ranks_of("PipelineTrial"), SHORT)
    losses = reported(story, "training", "loss")
    assert losses[-1] < losses[0] / 4
    assert reported(story, "validation", "validation_loss")[-1] < 0.25


@pytest.mark.long
def test_on_four_slots_it_is_two_pipelines_that_learn_them(state_folder: Path) -> None:
    local = (EXAMPLES.parents[1] / "conf" / "cluster" / "local.yaml").read_text()
    profile = state_folder / "conf" / "cluster" / "wide.yaml"
    profile.parent.mkdir(parents=True)
    profile.write_text(local.replace("slots_per_node: 2", "slots_per_node: 4"))
    story = finished("deepspeed_pipeline", SHORT, "resources.slots_per_trial=4", cluster="wide")
    assert reported(story, "validation", "validation_loss")[-1] < 0.25


# --- deepspeed_dcgan


@pytest.mark.long
def test_two_engines_learn_to_paint() -> None:
    story = finished("deepspeed_dcgan", "searcher.max_length={batches: 100}")
    assert reported(story, "validation", "energy_distance")[-1] < 2  # about 20 before training
    events = EventAccumulator(str(story.trial.tensorboard)).Reload()
    assert [image.step for image in events.Images("painted")] == [49, 99]


@pytest.mark.long
def test_they_go_on_bit_for_bit_after_a_preemption() -> None:
    few = ("searcher.max_length={batches: 40}", "scheduling_unit=1", "min_validation_period={batches: 20}")
    undisturbed = finished("deepspeed_dcgan", *few)
    story = begin("deepspeed_dcgan", *few)
    story.until_batch(5)
    (agent,) = story.pids("hpc_det.launch.agent")
    os.kill(agent, signal.SIGTERM)
    story.wait()
    assert story.causes == ["preempted", "finished"]
    assert story.series == undisturbed.series
