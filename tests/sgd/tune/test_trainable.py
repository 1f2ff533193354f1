from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from hpc_det.errors import UsageError
from hpc_det.sgd.driver.failures import RetriesUsedUp
from hpc_det.sgd.tune.trainable import CHECKPOINT, TorchTrainable, Trainable, merged, trainable_of
from tests.facts import refused


class Trainer:
    """A stand-in for TorchTrainer that records its calls."""

    def __init__(self, **kwargs: Any) -> None:
        self.kwargs = kwargs
        self.calls: list[Any] = []

    def train(self, **arguments: Any) -> dict[str, Any]:
        self.calls.append(("train", arguments))
        return {"epoch": 1, "train_loss": 2.0, "profile": {"mean_fwd_s": 0.1}}

    def validate(self, **arguments: Any) -> dict[str, Any]:
        self.calls.append(("validate", arguments))
        return {"val_loss": 3.0, "profile": {"mean_validation_s": 0.2}}

    def save(self, path: str) -> str:
        Path(path).write_text("state")
        return path

    def load(self, path: str) -> None:
        self.calls.append(("load", Path(path).read_text()))

    def shutdown(self) -> None:
        self.calls.append(("shutdown", {}))


def set_up(cls: type[TorchTrainable], config: dict[str, Any]) -> TorchTrainable:
    trainable = cls()
    trainable.setup(config)
    return trainable


def test_a_step_trains_without_retries_and_validates_both_profiled() -> None:
    trainable = set_up(trainable_of(Trainer), {})
    profile = {"mean_fwd_s": 0.1, "mean_validation_s": 0.2}
    assert trainable.step() == {"epoch": 1, "train_loss": 2.0, "val_loss": 3.0, "profile": profile}
    assert trainable.trainer.calls == [("train", {"max_retries": 0, "profile": True}), ("validate", {"profile": True})]


def test_a_trials_config_overlays_a_copy_that_no_other_trial_sees() -> None:
    base = {"lr": 0.1, "layers": [1]}
    cls = trainable_of(Trainer, config=base, num_workers=2)
    one = set_up(cls, {"lr": 0.5})
    one.trainer.kwargs["config"]["layers"].append(2)
    other = set_up(cls, {"depth": 3})
    assert one.trainer.kwargs == {"num_workers": 2, "config": {"lr": 0.5, "layers": [1, 2]}}
    assert other.trainer.kwargs["config"] == {"lr": 0.1, "layers": [1], "depth": 3}
    assert base == {"lr": 0.1, "layers": [1]}


def test_an_own_step_gets_the_trainer_and_the_number_of_the_iteration() -> None:
    seen = []

    def step(trainer: Any, info: dict[str, Any]) -> dict[str, Any]:
        seen.append((type(trainer), info))
        return {"loss": 1}

    trainable = set_up(trainable_of(Trainer, override_tune_step=step), {})
    assert [trainable.step(), trainable.step()] == [{"loss": 1}, {"loss": 1}]
    assert seen == [(Trainer, {"iteration": 0}), (Trainer, {"iteration": 1})]


@pytest.mark.parametrize("step", [lambda trainer: {}, lambda trainer, info, more: {}])
def test_a_step_takes_exactly_two_parameters(step: Any) -> None:
    with refused(ValueError, "override_tune_step", "2") as caught:
        trainable_of(Trainer, override_tune_step=step)
    assert isinstance(caught.value, UsageError)
    assert f"takes {len(inspect.signature(step).parameters)} parameters" in str(caught.value)


def test_a_checkpoint_is_loaded_by_its_path_or_its_folder(tmp_path: Path) -> None:
    trainable = set_up(trainable_of(Trainer), {})
    path = trainable.save_checkpoint(str(tmp_path))
    assert path == str(tmp_path / CHECKPOINT)
    trainable.load_checkpoint(path)
    trainable.load_checkpoint(str(tmp_path))
    assert trainable.trainer.calls == [("load", "state")] * 2


def test_in_a_search_the_trainers_run_folder_is_the_processs_own(tmp_path: Path) -> None:
    trainable = trainable_of(Trainer)()
    trainable.trial_folder = tmp_path
    trainable.setup({})
    run = Path(trainable.trainer.kwargs["run"])
    assert run.parent == tmp_path
    trainable.cleanup()
    assert not run.exists()
    assert trainable.trainer.calls == [("shutdown", {})]


def test_what_a_trial_takes_follows_from_its_workers() -> None:
    assert trainable_of(Trainer, num_workers=4, num_cpus_per_worker=2, use_gpu=True).resources() == {"cpu": 8, "gpu": 4}
    assert trainable_of(Trainer).resources() == {"cpu": 1, "gpu": 0}
    assert Trainable.resources() == {"cpu": 1, "gpu": 0}


def test_the_class_travels_with_what_is_local_to_a_function() -> None:
    factor = 7
    cls = trainable_of(Trainer, override_tune_step=lambda trainer, info: {"loss": factor})
    assert set_up(cloudpickle.loads(cloudpickle.dumps(cls)), {}).step() == {"loss": 7}


def test_maps_are_merged_in_depth_and_the_second_wins() -> None:
    assert merged({"a": {"x": 1, "y": 2}, "b": 1}, {"a": {"y": 3}, "b": {}}) == {"a": {"x": 1, "y": 3}, "b": {}}


def test_where_no_trainer_could_be_made_there_is_none_to_shut_down() -> None:
    class Refuses:
        def __init__(self, **arguments: Any) -> None:
            raise RetriesUsedUp("its ranks died")

    trainable = trainable_of(Refuses)()
    with pytest.raises(RetriesUsedUp):
        trainable.setup({})
    trainable.cleanup()
