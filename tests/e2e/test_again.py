"""Experiments that run again: forked to the same bits, continued after an end, trained longer."""

from __future__ import annotations

import pytest

from tests.e2e.story import WAITS_AT, WARM, Story, hpc_det
from tests.facts import unnamed

pytestmark = pytest.mark.usefixtures("warm")

SHORT = (WARM, "searcher.max_length.batches=20", "resources.slots_per_trial=1")


def again(story: Story, command: str, *options: str) -> Story:
    output = hpc_det("experiment", command, story.number, *options).stdout.splitlines()[-1]
    return Story.of(int(output.removeprefix("Created experiment ")) if command == "fork" else story.number)


@pytest.fixture(scope="module")
def finished(warm: None, tmp_path_factory: pytest.TempPathFactory) -> Story:
    """Return a finished experiment, which tests leave unchanged."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPC_DET_ROOT", str(tmp_path_factory.mktemp("finished")))
        story = Story.begin(*SHORT)
        story.wait()
    return story


@pytest.fixture
def beside_it(finished: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the state folder of `finished` for the experiments that the test creates."""
    monkeypatch.setenv("HPC_DET_ROOT", str(finished.trial.experiment().path.parents[1]))


@pytest.mark.long
@pytest.mark.usefixtures("beside_it")
def test_a_fork_with_another_seed_trains_to_other_bits(finished: Story) -> None:
    other = again(finished, "fork", "--config", "reproducibility.experiment_seed=6")
    other.wait()
    assert [where for *where, _ in other.series] == [where for *where, _ in finished.series]
    assert other.series != finished.series


@pytest.mark.usefixtures("beside_it")
def test_a_fork_trains_the_same_code_to_the_same_bits_whatever_became_of_the_folder(finished: Story) -> None:
    changed = finished.trial.experiment().code / "model_def.py"
    before = changed.read_text()
    changed.write_text("raise SystemExit('trials may write into their own copy')\n")
    try:
        fork = again(finished, "fork")
        fork.wait()
    finally:
        changed.write_text(before)
    assert fork.number != finished.number
    assert fork.same_as(finished)


def test_a_finished_trial_goes_on_to_a_greater_length_as_if_it_had_been_that_from_the_start(
    undisturbed_alone: Story,
) -> None:
    finished = Story.begin(*SHORT)
    finished.wait()
    refused = hpc_det("experiment", "continue", finished.number, check=False)
    assert refused.returncode == 2
    assert not unnamed(refused.stderr, f"experiment {finished.number}", "searcher.max_length")
    again(finished, "continue", "--config", "searcher.max_length.batches=40")
    finished.wait()
    assert finished.causes == ["finished"]
    assert finished.describe()["batches"] == 40
    assert finished.same_as(undisturbed_alone)


@pytest.mark.long
def test_a_killed_experiment_goes_on_from_its_newest_checkpoint(finished: Story) -> None:
    killed = Story.begin(*SHORT, WAITS_AT.format(9))
    killed.until_batch(9)
    hpc_det("experiment", "kill", killed.number)
    again(killed, "continue")
    killed.wait()
    assert killed.describe()["state"] == "COMPLETED"
    assert killed.same_as(finished)


@pytest.mark.long
def test_a_paused_experiment_goes_on_as_if_nothing_had_happened(finished: Story) -> None:
    paused = Story.begin(*SHORT, WAITS_AT.format(4))
    paused.until_batch(4)
    hpc_det("experiment", "pause", paused.number)
    paused.until(lambda: paused.causes == ["paused"])
    hpc_det("experiment", "activate", paused.number)
    paused.wait()
    assert paused.causes == ["paused", "finished"]
    assert paused.same_as(finished)


@pytest.mark.long
def test_a_cancelled_trial_saves_before_it_ends() -> None:
    story = Story.begin(*SHORT, WAITS_AT.format(4))
    story.until_batch(4)
    hpc_det("experiment", "cancel", story.number)
    assert story.wait(check=False).returncode == 1
    assert story.causes == ["cancelled"]
    assert story.describe()["state"] == "CANCELED"
    assert 4 <= story.describe()["attempts"][0]["batches"] < 20


@pytest.mark.long
def test_a_failed_trial_gets_another_chance() -> None:
    story = Story.begin(WARM, "hyperparameters.raise_at=12", "max_restarts=0")
    assert story.wait(check=False).returncode == 1
    refused = hpc_det("experiment", "continue", story.number, "--config", "hyperparameters.raise_at=-1", check=False)
    assert refused.returncode == 2
    assert f"`hpc-det experiment fork {story.number}`" in refused.stderr
    again(story, "continue", "--config", "max_restarts=1")
    assert story.wait(check=False).returncode == 1
    assert not unnamed(story.describe()["attempts"][-1]["why"], "failure 2", "max_restarts is 1")


@pytest.mark.long
def test_an_experiment_that_runs_is_not_continued() -> None:
    story = Story.begin(*SHORT, WAITS_AT.format(1))
    story.until_batch(1)
    refused = hpc_det("experiment", "continue", story.number, check=False)
    assert refused.returncode == 2
    assert f"experiment {story.number} is RUNNING" in refused.stderr
    hpc_det("experiment", "kill", story.number)
