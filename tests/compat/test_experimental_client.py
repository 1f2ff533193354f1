"""Determined's Python client: its names, arguments and errors on hpc_det's experiments."""

from __future__ import annotations

from datetime import timezone
from pathlib import Path
from typing import Any

import pytest

from hpc_det.compat import experimental_client as client
from hpc_det.compat.experimental_client import OrderBy
from hpc_det.errors import UsageError
from hpc_det.requeue import Action, Cause
from tests.cli.life import FakeScheduler, Life
from tests.facts import refused


def test_create_experiment_passes_its_arguments_on(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr("hpc_det.client.api.create", lambda *args, **options: given.append((args, options)))
    monkeypatch.setattr(client, "Experiment", lambda own: own)
    client.create_experiment("const.yaml", "model", includes=["data"], template="small", cluster="atlas")
    assert given == [(("const.yaml", "model"), {"includes": ["data"], "template": "small", "cluster": "atlas"})]


def test_an_experiment_has_determineds_attributes_and_methods(searched: Life) -> None:
    experiment = client.get_experiment(1)
    experiment.reload()
    assert (experiment.id, experiment.name, experiment.state) == (1, "digits", client.ExperimentState.COMPLETED)
    assert [trial.id for trial in experiment.list_trials()] == ["1/1", "1/2"]
    assert experiment.await_first_trial().id == "1/1"
    assert experiment.wait() == "COMPLETED"
    assert experiment.config["searcher"]["metric"] == "accuracy"


def test_an_experiment_without_a_trial_or_that_is_paused_is_not_awaited(life: Life, scheduler: FakeScheduler) -> None:
    experiment = client.get_experiment(1)
    experiment.pause()
    life.search.lose(0, "4711")
    with refused(ValueError, "experiment 1"):
        experiment.wait()
    experiment.kill()
    with refused(RuntimeError, "experiment 1", "CANCELED"):
        experiment.await_first_trial()


def test_checkpoints_are_sorted_by_a_metric(searched: Life) -> None:
    experiment, trial = client.get_experiment(1), client.get_trial("1/1")
    best, *_ = found = experiment.list_checkpoints("accuracy", OrderBy.DESCENDING, max_results=3)
    assert (best.uuid, len(found)) == (experiment.top_checkpoint().uuid, 3)
    assert [each.training.validation_metrics["accuracy"] for each in found] == [0.95, 0.9, 0.8]
    assert trial.top_checkpoint().training.trial_id == trial.id
    assert len(trial.list_checkpoints()) == 2
    with pytest.raises(AssertionError):
        experiment.list_checkpoints("accuracy")


def test_without_a_validation_there_is_no_top_checkpoint(life: Life) -> None:
    with pytest.raises(ValueError, match="no checkpoint"):
        client.get_experiment(1).top_checkpoint()


def test_metrics_are_records_with_determineds_fields(searched: Life) -> None:
    trial = client.get_trial("1/2")
    first, _ = trial.iter_metrics("validation")
    assert (first.trial_id, first.steps_completed, first.group) == ("1/2", 100, "validation")
    assert (first.metrics["accuracy"], first.end_time.tzinfo) == (0.7, timezone.utc)
    assert len([*trial.iter_metrics()]) == 4
    assert len([*client.iter_trials_metrics(["1/1", "1/2"], "training")]) == 4
    assert trial.hparams == searched.search.sample(2).hparams


def test_logs_have_a_head_a_tail_and_a_rank(life: Life) -> None:
    life.begins()
    life.rank_prints(0, "a\nb\nWARNING: c\n")
    life.rank_prints(1, "d\n")
    life.ends(Cause.FINISHED, Action.DONE)
    trial = client.get_trial("1/1")
    assert [*trial.iter_logs(rank_ids=[0], head=2)] == ["[rank=0] a", "[rank=0] b"]
    assert [*trial.iter_logs(rank_ids=[0], tail=1, min_level="WARNING")] == ["[rank=0] WARNING: c"]
    with refused(UsageError, "rank_ids", 2):
        next(trial.iter_logs(rank_ids=[0, 1]))


def test_a_checkpoint_is_downloaded_once_and_its_metadata_are_read(
    searched: Life, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint = client.get_checkpoint(client.get_experiment(1).top_checkpoint().uuid)
    checkpoint.add_metadata({"stage": "production"})
    assert checkpoint.metadata["stage"] == "production"
    checkpoint.remove_metadata(["stage"])
    assert "stage" not in checkpoint.metadata
    folder = checkpoint.download()
    assert folder == f"checkpoints/{checkpoint.uuid}"
    assert client.Checkpoint.load_metadata(folder) == {}
    Path(folder, "metadata.json").write_text('{"steps_completed": 400}')
    assert checkpoint.download() == folder
    assert client.Checkpoint.load_metadata(folder) == {"steps_completed": 400}
    assert checkpoint.resources == {"state_dict.pth": 7}


def test_lists_are_filtered_and_ordered(root: Path, scheduler: FakeScheduler) -> None:
    lives = [Life.submitted(root, title=f"number-{number}") for number in range(3)]
    lives[0].begins()
    lives[0].finishes()
    det = client.Determined(master="https://example.org")
    assert [found.id for found in det.list_experiments(order_by=OrderBy.DESCENDING)] == [3, 2, 1]
    assert [found.id for found in client.list_experiments(states=[client.ExperimentState.COMPLETED])] == [1]
    assert [found.id for found in client.list_experiments(experiment_ids=[2, 3], name="number-2")] == [3]
    assert [found.id for found in client.list_experiments(users=[str(root)])] == [1, 2, 3]


def test_what_has_no_counterpart_is_named(life: Life) -> None:
    with refused(AttributeError, "determined.experimental.client.Experiment.move_to_project"):
        _ = client.get_experiment(1).move_to_project
    assert client.login("https://example.org", user="ada") is None  # type: ignore[func-returns-value]


@pytest.mark.parametrize("wrong", ["7", "12-7", 7, "a/b"])
def test_a_trial_needs_the_number_of_its_experiment(wrong: Any) -> None:
    with refused(UsageError, repr(wrong), "12/7"):
        client.get_trial(wrong)
