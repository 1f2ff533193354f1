"""The shipped examples of DeepSpeedTrial, on real ranks, most of them started by DeepSpeed's launcher."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from hpc_det.checkpoint.committed import committed
from tests.e2e.gallery import EXAMPLES
from tests.e2e.story import Story, hpc_det, warm_ranks_of

OVERRIDE = "hyperparameters.overwrite_deepspeed_args"


def begin(example: str, *overrides: str, cluster: str = "local") -> Story:
    folder = EXAMPLES / example
    config = folder / ("tiny.yaml" if (folder / "tiny.yaml").exists() else f"{example}.yaml")
    return Story.begin("reproducibility.experiment_seed=5", *overrides, config=config, context=folder, cluster=cluster)


def finished(example: str, *overrides: str, cluster: str = "local") -> Story:
    story = begin(example, *overrides, cluster=cluster)
    story.wait()
    return story


def newest(story: Story) -> Path:
    return max(committed(story.trial.checkpoints), key=lambda checkpoint: checkpoint.steps).path


def reported(story: Story, kind: str, metric: str) -> list[float]:
    return [metrics[metric] for reported, _, metrics in story.series if reported == kind]


# --- deepspeed_zero3


@pytest.mark.long
@pytest.mark.integration
def test_zero_3_learns_and_continues_on_another_number_of_ranks() -> None:
    story = finished("deepspeed_zero3")
    losses = reported(story, "validation", "validation_loss")
    assert losses[-1] < losses[0] < 4
    parts = {path.name for path in newest(story).rglob("*_optim_states.pt")}
    assert len(parts) == 2
    longer = ("resources.slots_per_trial=1", "searcher.max_length.batches=60")
    hpc_det("experiment", "continue", story.number, *(word for each in longer for word in ("--config", each)))
    story.wait()
    assert reported(story, "validation", "validation_loss")[-1] < losses[-1]
    assert len({*newest(story).rglob("*_optim_states.pt")}) == 1


@pytest.mark.long
def test_a_search_changes_what_stands_in_the_deepspeed_config() -> None:
    story = finished(
        "deepspeed_zero3",
        "searcher={name: random, metric: validation_loss, max_trials: 3, max_length: {batches: 10}}",
        f"{OVERRIDE}.optimizer.params.lr={{type: log, minval: -4, maxval: -1}}",
        "resources.slots_per_trial=1",
    )
    trials = story.describe()["trials"]
    arguments = [trial["hyperparameters"]["overwrite_deepspeed_args"] for trial in trials]
    assert len({each["optimizer"]["params"]["lr"] for each in arguments}) == 3
    assert len({trial["best"]["value"] for trial in trials}) == 3


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
