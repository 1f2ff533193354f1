"""The arguments of `register`, its errors and its return value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from hpc_det.distributed.collectives import Distributed
from hpc_det.errors import UsageError
from hpc_det.pytorch.strategies.ddp import DataParallel
from hpc_det.sgd.operator.training_operator import TrainingOperator
from tests.distributed.ranks import OnRanks
from tests.facts import refused


class Registers(TrainingOperator):
    """Registers the result of config["what"]()."""

    def setup(self, config: dict[str, Any]) -> None:
        self.back = self.register(**config["what"]())


def registered(what: Callable[[], dict[str, Any]], **options: Any) -> Registers:
    return Registers({"what": what}, 0, 0, **options)


def layer() -> nn.Linear:
    return nn.Linear(2, 2)


def sgd(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for model in models for parameter in model.parameters()], lr=0.1)


def test_one_of_each_comes_back_as_it_went_in() -> None:
    model = layer()
    optimizer, criterion = sgd(model), nn.MSELoss()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    everything = {"models": model, "optimizers": optimizer, "criterion": criterion, "schedulers": scheduler}
    operator = registered(lambda: everything, scheduler_step_freq="epoch")
    assert operator.back == (model, optimizer, criterion, scheduler)
    assert (operator._models, operator._optimizers, operator._schedulers) == ([model], [optimizer], [scheduler])


def test_a_criterion_and_schedulers_come_back_only_if_they_were_given() -> None:
    model = layer()
    optimizer = sgd(model)
    assert registered(lambda: {"models": model, "optimizers": optimizer}).back == (model, optimizer)


def test_tuples_and_lists_come_back_as_such() -> None:
    models = layer(), layer()
    optimizers = [sgd(models[0]), sgd(models[1])]
    loss = nn.functional.mse_loss
    everything = {"models": models, "optimizers": optimizers, "criterion": loss, "schedulers": []}
    assert registered(lambda: everything, scheduler_step_freq="manual").back == (models, optimizers, loss, [])


def test_an_object_that_can_be_iterated_is_one_object() -> None:
    class Iterated(torch.optim.SGD):
        def __iter__(self) -> Iterator[int]:
            return iter([1, 2])

    model = nn.Sequential(layer(), layer())
    optimizer = Iterated(model.parameters(), lr=0.1)
    operator = registered(lambda: {"models": model, "optimizers": optimizer})
    assert operator.back == (model, optimizer)
    assert operator._models == [model]


def test_an_optimizer_is_what_has_an_optimizers_methods() -> None:
    class LikeLarc:
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.step, self.zero_grad = inner.step, inner.zero_grad
            self.state_dict, self.load_state_dict = inner.state_dict, inner.load_state_dict

    model = layer()
    optimizer = LikeLarc(sgd(model))
    assert registered(lambda: {"models": model, "optimizers": optimizer}).back == (model, optimizer)


@pytest.mark.parametrize(
    ("changes", "kind", "facts"),
    [
        ({"models": "a model"}, AssertionError, ["models", "'a model'", "nn.Module"]),
        ({"models": (layer(), None)}, AssertionError, ["models", None, "nn.Module"]),
        ({"optimizers": 3}, ValueError, ["optimizers", 3, "step", "zero_grad"]),
        ({"ddp_args": [1]}, ValueError, ["ddp_args", [1], "dict"]),
        ({"apex_args": ""}, ValueError, ["apex_args", "''", "dict"]),
        ({"schedulers": object()}, ValueError, ["schedulers", "<object object", "step"]),
    ],
)
def test_what_cannot_be_used_is_named(changes: dict[str, Any], kind: type[Exception], facts: list[object]) -> None:
    model = layer()
    with refused(kind, "register: ", *facts) as raised:
        registered(lambda: {"models": model, "optimizers": sgd(model), **changes}, scheduler_step_freq="batch")
    assert isinstance(raised.value, UsageError)


def test_schedulers_need_to_know_when_they_step() -> None:
    model = layer()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with refused(ValueError, "scheduler_step_freq"):
        registered(lambda: {"models": model, "optimizers": optimizer, "schedulers": scheduler})


def test_all_problems_are_said_at_once() -> None:
    with pytest.raises(UsageError) as raised:
        registered(lambda: {"models": layer(), "optimizers": 3, "schedulers": 4, "ddp_args": 5})
    assert len(raised.value.problems) == 4


# --- on several ranks


def _wrapped(distributed: Distributed) -> list[Any]:
    trained, frozen, own = layer(), layer().requires_grad_(False), nn.parallel.DistributedDataParallel(layer())
    models = [trained, frozen, own]
    options = {"models": models, "optimizers": sgd(trained), "ddp_args": {"broadcast_buffers": False}}
    operator = registered(lambda: options, is_distributed=True, wrap_ddp=True)
    back = operator.back[0]
    return [
        isinstance(back[0], DataParallel) and back[0].module is trained and not back[0].broadcast_buffers,
        back[1] is frozen,
        back[2] is own,
        operator._models == [trained, frozen, own.module],
        operator.device_ids,
    ]


def test_models_that_are_trained_are_wrapped_once_with_the_users_arguments(on_ranks: OnRanks) -> None:
    assert on_ranks(2, _wrapped) == [[True, True, True, True, None]] * 2


def _not_wrapped(distributed: Distributed) -> bool:
    model = layer()
    operator = registered(lambda: {"models": model, "optimizers": sgd(model)}, is_distributed=True, wrap_ddp=False)
    return operator.back[0] is model


def test_without_wrap_ddp_a_model_stays_as_it_is(on_ranks: OnRanks) -> None:
    assert on_ranks(2, _not_wrapped) == [True, True]
