from __future__ import annotations

import copy
import io
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from hpc_det.distributed.rng import restore_rng, rng_state
from hpc_det.errors import UsageError
from hpc_det.sgd.operator.options import MissingLoader
from hpc_det.sgd.operator.training_operator import TrainingOperator, get_test_operator
from hpc_det.sgd.rank.runner import Runner
from tests.facts import each_names, keys, refused
from tests.sgd.runners import Augmented, Regression, alone


@pytest.fixture(autouse=True)
def own_generators() -> Iterator[None]:
    before = rng_state()
    yield
    restore_rng(before)


# --- results


def test_a_call_without_num_steps_is_a_pass() -> None:
    runner = alone()
    results = [runner.train(), runner.train()]
    assert [{name: result[name] for name in ("epoch", "batch_count", "num_samples")} for result in results] == [
        {"epoch": 1, "batch_count": 7, "num_samples": 42},
        {"epoch": 2, "batch_count": 7, "num_samples": 42},
    ]
    assert {*results[0]} == {
        *("epoch", "batch_count", "num_samples", "train_loss", "last_train_loss", "draw", "last_draw")
    }
    assert runner.epochs_done == 2


def test_validation_has_no_epoch() -> None:
    result = alone().validate()
    assert {*result} == {
        *("batch_count", "num_samples", "val_loss", "last_val_loss", "val_accuracy", "last_val_accuracy")
    }
    assert (result["batch_count"], result["num_samples"]) == (7, 42)
    assert math.isnan(result["val_accuracy"])


def test_steps_go_on_over_calls_and_passes() -> None:
    runner = alone()
    seen = [(runner.train(num_steps)["epoch"], runner.epochs_done) for num_steps in (3, None, 8, 6, 7)]
    assert seen == [(1, 0), (1, 1), (3, 2), (3, 3), (4, 4)]
    assert runner.operator.global_step == 3 + 4 + 8 + 6 + 7


def test_validation_goes_on_over_calls_too() -> None:
    runner = alone()
    assert [runner.validate(steps)["batch_count"] for steps in (5, None, None)] == [5, 2, 7]


def test_profile_adds_mean_times() -> None:
    runner = alone()
    trained, validated = runner.train(profile=True), runner.validate(profile=True)
    assert {*trained["profile"]} == {"mean_train_epoch_s", "mean_fwd_s", "mean_grad_s", "mean_apply_s"}
    assert {*validated["profile"]} == {"mean_validation_s", "mean_eval_fwd_s"}
    assert 0 < trained["profile"]["mean_fwd_s"] < trained["profile"]["mean_train_epoch_s"]
    assert "profile" not in runner.train()


def test_an_error_ends_the_profile() -> None:
    runner = with_hooks(train_epoch=lambda operator, iterator: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runner.train(profile=True)
    with runner.operator.timers.record("later"):
        pass
    assert "mean_later_s" not in runner.operator.timers.stats()


# --- hooks of the user


def with_hooks(**hooks: Any) -> Runner:
    return alone(type("Hooked", (Regression,), hooks))


def test_info_reaches_every_hook() -> None:
    infos: list[dict[str, Any]] = []

    def train_batch(operator: Any, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        infos.append(dict(batch_info))
        return {"train_loss": 1.0}

    runner = alone(type("Telling", (Regression,), {"train_batch": train_batch}), scheduler_step_freq="manual")
    runner.train(info={"mine": "x", "epoch_idx": 77})
    runner.train(2)
    runner.train(2)
    common = {"__use_fp16__": False}
    assert infos[0] == {**common, "batch_idx": 0, "global_step": 0, "epoch_idx": 0, "__num_steps__": None, "mine": "x"}
    assert infos[8] == {**common, "batch_idx": 1, "global_step": 8, "epoch_idx": 1, "__num_steps__": 2}
    assert infos[10] == {**common, "batch_idx": 1, "global_step": 10, "epoch_idx": 1, "__num_steps__": 2}


def test_the_callers_info_is_left_alone() -> None:
    info = {"mine": 1}
    alone().train(1, info=info)
    assert info == {"mine": 1}


def as_in_1_2(operator: Any, iterator: Any, info: Any) -> dict[str, Any]:
    return {"batches": len([*iterator]), "info": info}


def as_in_1_8(operator: Any, iterator: Any, info: Any = None, num_steps: Any = None, epoch_idx: Any = 0) -> Any:
    return {"batches": len([*iterator]), "info": info, "num_steps": num_steps, "epoch_idx": epoch_idx}


def with_all(operator: Any, iterator: Any, **offered: Any) -> Any:
    return {"batches": len([*iterator]), **offered}


INFO = {"__num_steps__": 3, "__use_fp16__": False, "epoch_idx": 0}


@pytest.mark.parametrize(
    ("train_epoch", "expected"),
    [
        (lambda operator, iterator: {"batches": len([*iterator])}, {"batches": 3}),
        (as_in_1_2, {"batches": 3, "info": INFO}),
        (as_in_1_8, {"batches": 3, "info": INFO, "num_steps": 3, "epoch_idx": 0}),
        (with_all, {"batches": 3, "info": INFO, "num_steps": 3, "epoch_idx": 0}),
    ],
)
def test_an_override_gets_the_keywords_that_it_takes(train_epoch: Any, expected: Any) -> None:
    assert with_hooks(train_epoch=train_epoch).train(3) == {"epoch": 1, **expected}


def test_an_override_of_validate_gets_info() -> None:
    runner = with_hooks(validate=lambda operator, val_iterator, info: {"batches": len([*val_iterator]), **info})
    assert runner.validate(2) == {"batches": 2, "__num_steps__": 2, "__use_fp16__": False, "epoch_idx": 0}


def test_the_length_of_a_pass_is_known_to_train_epoch() -> None:
    runner = with_hooks(train_epoch=lambda operator, iterator: {"length": len(iterator), "taken": len([*iterator])})
    assert [runner.train(steps)["length"] for steps in (2, None, None)] == [2, 5, 7]


def test_results_of_an_override_are_plain() -> None:
    loss = torch.nn.Parameter(torch.tensor(2.5)) * 2
    runner = with_hooks(train_epoch=lambda operator, iterator: {"loss": loss, "nested": {"loss": [loss]}})
    result = runner.train()
    assert type(result["loss"]) is float
    assert result["loss"] == 5.0
    assert not result["nested"]["loss"][0].requires_grad


def test_hooks_for_tests_are_called() -> None:
    operator_cls = get_test_operator(Regression)
    runner = alone(operator_cls, config={"custom_func": lambda operator, iterator, info: {"sum": len([*iterator])}})
    assert runner.train(4) == {"epoch": 1, "sum": 4}


def test_anything_but_a_dict_is_refused() -> None:
    with refused(UsageError, "NoneType"):
        with_hooks(train_epoch=lambda operator, iterator: None).train()


class WithoutData(TrainingOperator):
    def setup(self, config: dict[str, Any]) -> None:
        model = nn.Linear(1, 1)
        self.register(models=model, optimizers=torch.optim.SGD(model.parameters(), lr=1))


def test_without_a_loader_training_is_refused() -> None:
    runner = alone(WithoutData)
    with refused(MissingLoader, "train_loader"):
        runner.train()
    with refused(ValueError, "validation_loader"):
        runner.validate()
    runner.restore(runner.shared(), runner.own())
    assert runner.epochs_done == 0


def test_data_that_is_registered_again_begins_a_pass() -> None:
    runner = alone()
    runner.train(2)
    runner.apply_operator(lambda operator: operator.register_data(train_loader=DataLoader(Augmented(5), 5)))
    result = runner.train()
    assert (result["num_samples"], result["epoch"]) == (5, 2)


# --- what else a driver asks for


def test_functions_run_on_the_rank() -> None:
    runner = alone()
    assert runner.apply(lambda: 7) == 7
    assert runner.apply_operator(lambda operator: operator.world_size) == 1


def test_update_scheduler_gives_the_metric_to_each_scheduler() -> None:
    steps: list[Any] = []

    class Two(TrainingOperator):
        def setup(self, config: dict[str, Any]) -> None:
            model = nn.Linear(1, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=1)
            schedulers = [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer) for _ in range(2)]
            for number, scheduler in enumerate(schedulers):
                scheduler.step = lambda metric, number=number: steps.append((number, metric))  # type: ignore[method-assign,assignment]
            self.register(models=model, optimizers=optimizer, schedulers=schedulers)

    alone(Two).update_scheduler(0.5)
    assert steps == [(0, 0.5), (1, 0.5)]


def test_models_are_the_registered_ones() -> None:
    runner = alone()
    assert [type(model) for model in runner.models()] == [nn.Sequential]
    assert runner.models(to_cpu=True) == runner.models()


# --- states


def reloaded(state: Any, *, weights_only: bool = True) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def test_a_state_has_raysgds_keys_and_loads_without_pickle() -> None:
    runner = alone()
    runner.train(3)
    state = reloaded(runner.state_dict())
    assert {*state} == {"epoch", "operator", "models", "optimizers", "schedulers"}
    assert state["epoch"] == 1
    assert len(state["operator"]["seen"]) == 18
    assert "0.weight" in state["models"][0]
    reloaded(runner.shared())
    reloaded(runner.own())


def test_mixed_precision_has_a_key_of_its_own() -> None:
    assert "amp_native" in alone(use_fp16=True).state_dict()


def test_a_state_makes_another_runner_train_on() -> None:
    first, second = alone(), alone(config={"seed": 8})
    first.train()
    second.train(2)
    second.load_state_dict(reloaded(first.state_dict()))
    assert equal(second.state_dict(), first.state_dict())
    assert second.train()["epoch"] == 2, "the pass that was open is over"
    assert second.epochs_done == 2


def test_training_leaves_a_state_that_was_loaded_alone() -> None:
    runner = alone()
    runner.train(3)
    state = copy.deepcopy(runner.state_dict())
    before = copy.deepcopy(state)
    runner.load_state_dict(state)
    runner.train(3)
    assert equal(state, before)
    assert not equal(runner.state_dict(), before)


def test_a_snapshot_hands_tensors_over_as_they_are() -> None:
    runner = alone()
    runner.train(1)
    shared = runner.shared()
    weight = runner.models()[0].state_dict()["0.weight"]
    assert shared["state"]["models"][0]["0.weight"].data_ptr() == weight.data_ptr()


def test_the_state_of_something_else_is_refused_with_all_that_is_wrong() -> None:
    runner = alone()
    state = {"epoch": 1, "models": [], "optimizers": [1, 2]}
    with pytest.raises(UsageError) as raised:
        runner.load_state_dict(state)
    facts: list[list[object]] = [
        ["operator"],
        ["models", 0, 1, "setup"],
        ["optimizers", 2, 1, "setup"],
        ["schedulers", 0, 1, "setup"],
    ]
    assert keys(raised.value.problems) == ["state"] * 4
    each_names(raised.value.problems, *facts)


def test_what_is_frozen_by_hand_stays_frozen_after_a_restore() -> None:
    runner = alone()
    next(runner.models()[0].children()).requires_grad_(False)
    again = alone()
    again.restore(reloaded(runner.shared()), runner.own())
    assert [parameter.requires_grad for parameter in again.models()[0].parameters()][:3] == [False, False, True]


def equal(first: Any, second: Any) -> bool:
    files = [io.BytesIO(), io.BytesIO()]
    for state, file in zip((first, second), files, strict=True):
        torch.save(state, file)
    return files[0].getvalue() == files[1].getvalue()
