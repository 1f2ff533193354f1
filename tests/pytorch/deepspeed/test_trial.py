"""The methods that a DeepSpeedTrial must implement, and its methods for saving and loading."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_det.distributed.collectives import Distributed
from hpc_det.errors import HpcDetError
from hpc_det.pytorch import Reducer
from hpc_det.pytorch.deepspeed import DeepSpeedTrial, DeepSpeedTrialContext
from hpc_det.pytorch.deepspeed.state import save_facts
from hpc_det.pytorch.strategies.strategy import numbered
from hpc_det.pytorch.trial.trial import implements, interface_problems
from tests.distributed.ranks import OnRanks
from tests.facts import each_names, keys
from tests.pytorch.deepspeed.engines import config, new_engine, train


class Whole(DeepSpeedTrial):
    """Implements only the required methods."""

    def build_training_data_loader(self) -> None: ...

    def build_validation_data_loader(self) -> None: ...

    def train_batch(self, dataloader_iter: Iterator[Any] | None, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        return {}

    def evaluate_batch(self, dataloader_iter: Iterator[Any] | None, batch_idx: int) -> dict[str, Any]:
        return {"iterator": dataloader_iter, "number": batch_idx}


class OneArgument(Whole):
    def evaluate_batch(self, dataloader_iter: Iterator[Any] | None) -> dict[str, Any]:  # type: ignore[override]
        return {"iterator": dataloader_iter}


class Both(Whole):
    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
        return {}


class Half(DeepSpeedTrial):
    def train_batch(self, dataloader_iter: Iterator[Any] | None, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        return {}


def test_a_class_with_all_it_takes_is_a_trial() -> None:
    assert interface_problems(Whole) == interface_problems(OneArgument) == []


def test_what_is_missing_or_too_much_is_named() -> None:
    builders, evaluations = (
        ["build_training_data_loader", "build_validation_data_loader"],
        ["evaluate_batch", "evaluate_full_dataset"],
    )
    each_names(interface_problems(Half), builders, ["neither", *evaluations])
    each_names(interface_problems(Both), ["both", *evaluations])


def test_its_own_save_and_load_are_no_users() -> None:
    class WithSave(Whole):
        def save(self, context: DeepSpeedTrialContext, path: Path) -> None: ...

    assert [implements(kind, "save") for kind in (Whole, WithSave)] == [False, True]
    assert not implements(WithSave, "load")


def test_evaluate_batch_takes_the_number_or_does_not() -> None:
    assert numbered(Whole(None).evaluate_batch)("an iterator", 3) == {"iterator": "an iterator", "number": 3}  # type: ignore[arg-type]
    assert numbered(OneArgument(None).evaluate_batch)("an iterator", 3) == {"iterator": "an iterator"}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["train_batch", "evaluate_batch", "build_training_data_loader", "build_validation_data_loader"]
)
def test_nothing_is_implemented_without_a_user(name: str) -> None:
    arguments = (None, 0, 0) if name == "train_batch" else ()
    with pytest.raises(NotImplementedError):
        getattr(DeepSpeedTrial(None), name)(*arguments)  # type: ignore[arg-type]


def test_metrics_are_averaged_and_no_callback_is_called_by_default() -> None:
    trial = Whole(None)  # type: ignore[arg-type]
    assert trial.evaluation_reducer() is Reducer.AVG
    assert trial.build_callbacks() == {}


# --- save and load


def new_trial(distributed: Distributed, seed: int) -> Whole:
    context = DeepSpeedTrialContext({"hparams": {}, "config": {}}, distributed)
    for number in range(2):
        context.wrap_model_engine(new_engine(distributed, config(1), seed=seed + number))
    return Whole(context)


def weights(trial: Whole) -> list[torch.Tensor]:
    return [value.clone() for engine in trial.context.models for value in engine.module.state_dict().values()]


def saved_and_loaded(distributed: Distributed, folder: Path) -> dict[str, Any]:
    trial = new_trial(distributed, seed=1)
    for engine in trial.context.models:
        train(engine, 0, 2)
    trial.save(trial.context, folder)
    save_facts(trial.context, folder)
    distributed.barrier()
    saved = weights(trial)
    other = new_trial(distributed, seed=5)
    other.load(other.context, folder)
    losses = [[train(engine, 2, 2) for engine in each.context.models] for each in (trial, other)]
    unloaded = weights(new_trial(distributed, seed=5))
    distributed.barrier()
    if distributed.is_chief:
        shutil.rmtree(folder / "model1")
    distributed.barrier()
    with pytest.raises(HpcDetError) as caught:
        other.load(other.context, folder)
    return {"losses": losses, "by chance": all(map(torch.equal, saved, unloaded)), "refusal": caught.value.problems}


def test_every_engine_is_saved_under_its_number_and_loaded_from_there(on_ranks: OnRanks, tmp_path: Path) -> None:
    ranks = on_ranks(2, saved_and_loaded, tmp_path)
    assert (tmp_path / "model0" / "mp_rank_00_model_states.pt").is_file()
    for said in ranks:
        uninterrupted, resumed = said["losses"]
        assert uninterrupted == resumed
        assert not said["by chance"]
        assert keys(said["refusal"]) == [f"{tmp_path / 'model1'}"]
