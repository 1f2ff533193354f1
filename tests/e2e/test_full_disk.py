"""A training whose checkpoints find no space continues from the last one as soon as there is space."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpc_det.store.journal import Journal
from tests.e2e.story import WARM, Story
from tests.small_disk import disk as disk
from tests.small_disk import fill

pytestmark = pytest.mark.usefixtures("warm")


@pytest.mark.long
def test_a_training_goes_on_bit_for_bit_when_there_is_space_again(undisturbed_alone: Story, disk: Path) -> None:
    elsewhere = f"checkpoint_storage={{type: shared_fs, host_path: {disk}}}"
    story = Story.begin(WARM, elsewhere, "hyperparameters.batch_s=0.3", "max_restarts=0")
    story.until_batch(1)
    ballast = fill(disk)
    story.until(lambda: "disk full" in story.causes)
    ballast.unlink()
    story.wait()
    assert set(story.causes[:-1]) == {"disk full"}
    assert story.same_as(undisturbed_alone)
    failure = next(event["failure"] for event in Journal(story.trial.journal).events() if event["event"] == "ended")
    assert re.search(rf"{story.trial.checkpoints}/\S+: No space left on device, \S+ kB needed, 0 B free; ", failure)
    assert "disk full" in story.describe()["attempts"][0]["cause"]
