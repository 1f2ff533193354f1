"""Scripts that use Determined's Core API, run by the real command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_det.checkpoint.committed import committed
from hpc_det.store.experiments import ExperimentStore
from hpc_det.store.journal import Journal
from tests.e2e.story import Story, hpc_det

pytestmark = pytest.mark.integration

SCRIPTS = Path(__file__).with_name("core_api")
TWO_RANKS = (
    "entrypoint=python3 -m determined.launch.torch_distributed python3 count.py --wait-at 15",
    "resources.slots_per_trial=2",
)
ASHA = (
    "searcher.name=adaptive_asha",
    "searcher.time_metric=batches",
    "searcher.max_time=40",
    "searcher.max_trials=4",
    "searcher.divisor=2",
    "searcher.max_rungs=2",
    "searcher.mode=aggressive",
    "searcher.max_concurrent_trials=1",
    "hyperparameters.increment={type: int, minval: 1, maxval: 90}",
)


def begin(*overrides: str) -> Story:
    return Story.begin(*overrides, config=SCRIPTS / "count.yaml", context=SCRIPTS)


def counts(story: Story) -> list[str]:
    return [(each.path / "count").read_text() for each in committed(story.trial.checkpoints)]


def pause_and_activate(story: Story, batch: int) -> None:
    story.until_batch(batch)
    hpc_det("experiment", "pause", story.number)
    story.until_ended(1)
    hpc_det("experiment", "activate", story.number)
    story.wait()


def test_a_script_that_is_paused_continues_at_its_checkpoint() -> None:
    story = begin("entrypoint=python3 count.py --wait-at 15")
    pause_and_activate(story, 15)
    assert story.causes == ["paused", "finished"]
    assert counts(story)[0] == "80,40,1"
    validations = [steps for kind, steps, _ in story.series if kind == "validation"]
    assert validations == [*range(5, 41, 5)]


@pytest.mark.long
def test_two_ranks_stop_at_the_same_call_and_continue() -> None:
    story = begin(*TWO_RANKS)
    pause_and_activate(story, 15)
    assert story.causes == ["paused", "finished"]
    assert counts(story)[0] == "160,40,1"
    for rank in range(2):
        assert "stops at 15" in story.trial.rank_log(1, rank).read_text()


@pytest.mark.long
def test_invalid_hyperparameters_end_the_trial_without_another_attempt() -> None:
    story = begin("hyperparameters.increment=101", "max_restarts=3")
    story.wait(check=False)
    assert len(story.causes) == 1
    assert "too large an increment" in story.logged


@pytest.mark.long
@pytest.mark.parametrize("entrypoint", ["python3 count.py", "python3 rungs.py"])
def test_a_search_pauses_and_promotes_trials(entrypoint: str) -> None:
    """In the style of 0.38, which reports validations, and of 0.37, which iterates over operations."""
    story = begin(*ASHA, f"entrypoint={entrypoint}", "reproducibility.experiment_seed=1")
    story.wait()
    trials = ExperimentStore(story.trial.experiment().root()).folder(story.number).trials()
    ends = [[end.cause.value for end in Journal(trial.journal).history()] for trial in trials]
    assert len(ends) == 4
    assert ["waiting", "finished"] in ends  # promoted later
    assert ["waiting"] in ends  # never promoted
    newest = {committed(trial.checkpoints)[0].steps for trial in trials}
    assert newest == {20, 40}


@pytest.mark.long
def test_the_callback_for_transformers_stops_and_continues() -> None:
    pytest.importorskip("transformers")
    story = begin("entrypoint=python3 finetune.py", "searcher.metric=eval_loss", "searcher.max_length={batches: 18}")
    story.until(story.trial.groups.exists)
    hpc_det("experiment", "pause", story.number)
    story.until_ended(1)
    assert story.causes == ["paused"]
    (stopped,) = committed(story.trial.checkpoints)
    hpc_det("experiment", "activate", story.number)
    story.wait()
    assert story.causes == ["paused", "finished"]
    newest = committed(story.trial.checkpoints)[0]
    assert (stopped.steps, newest.steps) == (9, 18)
    assert (newest.path / "checkpoint-18" / "my_data.json").read_text() == '{"note": "mine"}'
    validations = [steps for kind, steps, _ in story.series if kind == "validation"]
    assert validations == [6, 12, 18]
