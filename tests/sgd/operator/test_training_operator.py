"""The default loops of TrainingOperator, and the errors for missing parts."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hpc_det.distributed.collectives import Distributed
from hpc_det.errors import UsageError
from hpc_det.sgd.operator.training_operator import TrainingOperator, get_test_metrics_operator, get_test_operator
from tests.distributed.ranks import OnRanks
from tests.facts import refused
from tests.sgd.operators import Batch, Classifier, batches, classifier


def trained_by_hand(model: nn.Module, data: list[Batch]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    losses = []
    for features, target in data:
        loss = nn.functional.cross_entropy(model(features), target)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_training_is_bit_for_bit_what_a_loop_by_hand_does() -> None:
    operator, data = classifier(), batches(4, 4, 2)
    by_hand = copy.deepcopy(operator.model)
    result = operator.train_epoch(iter(data), {})
    first, second, third = trained_by_hand(by_hand, data)
    assert result == {
        "batch_count": 3,
        "num_samples": 10,
        "train_loss": pytest.approx((4 * first + 4 * second + 2 * third) / 10),
        "last_train_loss": third,
    }
    assert operator.global_step == 3
    assert all(map(torch.equal, operator.model.parameters(), by_hand.parameters()))


def test_validation_changes_nothing_and_knows_the_accuracy() -> None:
    operator = classifier()
    features = torch.eye(4)
    target = operator.model(features).argmax(dim=1)
    target[0] = (target[0] + 1) % 3
    result = operator.validate(iter([(features, target), (features[1:], target[1:])]))
    assert result["val_accuracy"] == pytest.approx(6 / 7)
    assert result["last_val_accuracy"] == 1.0
    assert {"batch_count", "num_samples", "val_loss", "last_val_loss"} < result.keys()
    assert not operator.model.training
    assert all(parameter.grad is None for parameter in operator.model.parameters())
    assert operator.global_step == 0


@pytest.mark.parametrize(
    ("output", "target", "accuracy"),
    [
        (torch.eye(5, 3), torch.tensor([0, 1, 2, 1, 1]), 0.6),
        (torch.zeros(2, 3, 4), torch.tensor([[0, 0, 0, 1], [0, 0, 0, 0]]), 7 / 8),
        (torch.zeros(2, 1), torch.zeros(2, 1), math.nan),
        (torch.zeros(2), torch.zeros(2), math.nan),
    ],
    ids=["classes", "classes of pixels", "regression", "no classes"],
)
def test_accuracy_is_that_of_each_target_or_not_a_number(
    output: torch.Tensor, target: torch.Tensor, accuracy: float
) -> None:
    operator = classifier()
    operator.model, operator.criterion = lambda features: output, lambda outputs, targets: torch.tensor(0.0)
    result = operator.validate_batch((torch.zeros(len(target)), target), {})
    assert result["val_accuracy"] == pytest.approx(accuracy, nan_ok=True)


def test_steps_that_a_user_calls_give_plain_numbers() -> None:
    operator = classifier()
    (batch,) = batches(4)
    trained, validated = operator.train_batch(batch, {}), operator.validate_batch(batch, {})
    assert {name: type(value) for name, value in trained.items()} == {"train_loss": float, "num_samples": int}
    assert all(type(validated[name]) is float for name in ("val_loss", "val_accuracy"))


def test_a_model_of_several_inputs_gets_all_features() -> None:
    class TwoInputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.layer(left + right)
            return output

    class Operator(TrainingOperator):
        def setup(self, config: dict[str, Any]) -> None:
            model = TwoInputs()
            self.model, self.optimizer, self.criterion = self.register(
                models=model, optimizers=torch.optim.SGD(model.parameters(), 0.1), criterion=nn.CrossEntropyLoss()
            )

    (batch,) = batches(4)
    assert Operator({}, 0, 0).train_epoch([(batch[0], *batch)])["num_samples"] == 4


# --- overrides


class Echo(Classifier):
    """Its batches return only the information that they receive."""

    def train_batch(self, batch: Any, batch_idx: Any) -> dict[str, Any]:  # the seed's documentation calls it so
        return {"told": dict(batch_idx), "loss": torch.tensor(float(batch)), "num_samples": batch}

    def validate_batch(self, batch: Any, batch_info: Mapping[str, Any]) -> dict[str, Any]:
        return {"value": float(batch), **batch_info}


def test_a_batch_is_told_where_it_is_and_what_the_caller_said() -> None:
    seen: list[dict[str, Any]] = []

    class Operator(Echo):
        def train_batch(self, batch: Any, batch_idx: Any) -> dict[str, Any]:
            seen.append(batch_idx)
            return {"loss": torch.tensor(float(batch)), "num_samples": batch}

    operator = Operator({}, 0, 0)
    operator.train_epoch([1], {"mine": 7})
    result = operator.train_epoch([1, 3], {"mine": 7})
    assert seen[1:] == [{"batch_idx": 0, "global_step": 1, "mine": 7}, {"batch_idx": 1, "global_step": 2, "mine": 7}]
    assert result == {"batch_count": 2, "num_samples": 4, "loss": 2.5, "last_loss": 3.0}
    assert Echo({}, 0, 0).validate([5], {"mine": 7})["last_batch_idx"] == 0


def test_a_step_that_was_put_on_the_operator_itself_is_called() -> None:
    operator = classifier()
    operator.train_batch = lambda batch, batch_info: {"own": 1.0}  # type: ignore[method-assign]
    assert operator.train_epoch([0])["own"] == 1.0


def test_several_models_are_trained_by_a_step_of_their_own_and_switched_together() -> None:
    class Pair(TrainingOperator):
        def setup(self, config: dict[str, Any]) -> None:
            models = nn.Linear(4, 3), nn.Linear(4, 3)
            optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
            self.models, self.optimizers = self.register(models=models, optimizers=optimizers)

        def train_batch(self, batch: Any, batch_info: Any) -> dict[str, Any]:
            return {f"training_{i}": model.training for i, model in enumerate(self.models)}

        def validate_batch(self, batch: Any, batch_info: Any) -> dict[str, Any]:
            return self.train_batch(batch, batch_info)

    operator = Pair({}, 0, 0)
    assert operator.validate([0])["training_1"] == 0
    assert operator.train_epoch([0])["training_0"] == 1


# --- what is missing


def test_setup_must_be_there() -> None:
    with refused(NotImplementedError, "TrainingOperator", "setup(config)"):
        TrainingOperator({}, 0, 0)


@pytest.mark.parametrize("name", ["model", "optimizer", "criterion"])
def test_a_default_loop_names_what_it_misses(name: str) -> None:
    operator = classifier()
    delattr(operator, name)
    with refused(RuntimeError, f"self.{name}", "setup", "self.register(") as raised:
        operator.train_epoch(batches(2))
    assert isinstance(raised.value, UsageError)


@pytest.mark.parametrize("batch", [torch.zeros(4, 4), [torch.zeros(4)], {"features": 0}])
def test_a_batch_that_has_no_target_is_named(batch: Any) -> None:
    with refused(UsageError, "train_batch", "validate_batch"):
        classifier().train_epoch([batch])


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_a_loader_is_missed_when_it_is_used(kind: type[Exception]) -> None:
    operator = classifier()
    with refused(kind, "train_loader"):
        operator._get_train_loader()
    with refused(kind, "validation_loader"):
        operator._get_validation_loader()


def test_loaders_are_kept_as_they_were_given() -> None:
    operator, train, validation = classifier(), batches(1), batches(2)
    operator.register_data(train_loader=train, validation_loader=validation)
    assert operator._get_train_loader() is train
    assert operator._get_validation_loader() is validation


# --- schedulers


@pytest.mark.parametrize(("freq", "rate"), [("batch", 1 / 8), ("epoch", 1 / 2), ("manual", 1.0)])
def test_a_scheduler_steps_as_often_as_was_said(freq: str, rate: float) -> None:
    operator = classifier({"scheduler": True}, scheduler_step_freq=freq)
    operator.train_epoch(batches(2, 2, 2))
    assert operator.optimizer.param_groups[0]["lr"] == rate


def test_a_step_freq_without_any_scheduler_is_no_mistake() -> None:
    assert classifier(scheduler_step_freq="epoch").train_epoch(batches(2))["batch_count"] == 1


def test_registered_schedulers_that_the_default_loop_does_not_find_are_one() -> None:
    operator = classifier({"scheduler": True}, scheduler_step_freq="epoch")
    del operator.scheduler
    with refused(RuntimeError, "self.scheduler"):
        operator.train_epoch(batches(2))


# --- facts


def test_an_operator_knows_where_it_runs() -> None:
    operator = Classifier({"a": 1}, 3, 1, is_distributed=False, world_size=4, scheduler_step_freq="manual")
    assert (operator.config, operator.world_rank, operator.local_rank, operator.world_size) == ({"a": 1}, 3, 1, 4)
    assert (operator.device, operator.device_ids, operator.use_gpu) == (torch.device("cpu"), None, False)
    assert (operator.is_distributed, operator.scheduler_step_freq, operator.use_tqdm) == (False, "manual", False)
    assert operator.state_dict() is None


@pytest.mark.gpu
def test_on_a_gpu_models_criterion_and_batches_are_there() -> None:
    operator = classifier(use_gpu=True)
    operator.criterion = nn.CrossEntropyLoss(weight=torch.ones(3, device="cuda"))
    result = operator.train_epoch(batches(4, 4))
    assert operator.model.weight.is_cuda
    assert operator.device_ids == [0]
    assert {type(result["train_loss"]), type(result["last_train_loss"])} == {float}
    assert operator.validate(batches(4))["num_samples"] == 4


def test_a_profile_times_each_part_of_a_step() -> None:
    operator = classifier()
    operator.timers.enable()
    operator.train_epoch(batches(2))
    operator.validate(batches(2))
    stats = operator.timers.stats()
    assert stats.keys() == {"mean_fwd_s", "mean_grad_s", "mean_apply_s", "mean_eval_fwd_s"}
    assert all(0 < seconds < 10 for seconds in stats.values())


# --- for tests of users


def test_an_operator_for_tests_calls_the_function_of_the_config() -> None:
    def custom(operator: TrainingOperator, iterator: Iterable[int], info: Mapping[str, Any]) -> dict[str, Any]:
        return {"sum": sum(iterator), "rank": operator.world_rank, **info}

    with_function = get_test_operator(Classifier)({"custom_func": custom}, 0, 0)
    assert with_function.train_epoch([1, 2], {"a": 1}) == {"sum": 3, "rank": 0, "a": 1}
    assert with_function.validate([3], {}) == {"sum": 3, "rank": 0}
    assert get_test_operator(Classifier)({}, 0, 0).train_epoch([], {}) == {"done": 1}


def test_an_operator_for_tests_of_metrics_adds_scores() -> None:
    config = {"scores": [4.0, 0.0], "val_scores": [6.0], "key": "score"}
    operator = get_test_metrics_operator(Classifier)(config, 0, 0)
    result = operator.train_epoch(batches(4, 4))
    assert (result["score"], result["last_score"]) == (0.5, 0.0)  # 4 of 8 samples
    assert operator.validate(batches(3))["score"] == 2.0


# --- on several ranks


def _trained_together(distributed: Distributed) -> list[torch.Tensor]:
    operator = Classifier({}, distributed.rank, distributed.rank, is_distributed=True, wrap_ddp=True, world_size=2)
    own = [batch[distributed.rank :: 2] for batch in batches(8)[0]]
    operator.train_epoch([tuple(own)])
    return [parameter.detach() for parameter in operator.model.parameters()]


def test_two_ranks_train_as_one_does_on_both_their_batches(on_ranks: OnRanks) -> None:
    first, second = on_ranks(2, _trained_together)
    alone = classifier()
    alone.train_epoch(batches(8))
    for one, other, expected in zip(first, second, alone.model.parameters(), strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, expected.detach())


class Normalized(TrainingOperator):
    def setup(self, config: dict[str, Any]) -> None:
        model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), 0.1), criterion=nn.CrossEntropyLoss()
        )


def _validated_unevenly(distributed: Distributed) -> tuple[int, bool]:
    operator = Normalized({}, distributed.rank, distributed.rank, is_distributed=True, wrap_ddp=True, world_size=2)
    operator.train_epoch(batches(4 + distributed.rank))  # afterwards each rank has different running means
    result = operator.validate(batches(*[4] * (2 * distributed.rank)))
    means = operator.model.module[0].running_mean.clone()
    of_rank_0 = means.clone()
    dist.broadcast(of_rank_0, src=0)
    operator.train_epoch(batches(4))  # a step that needs both ranks
    return result["batch_count"], torch.equal(means, of_rank_0)


def test_ranks_with_different_numbers_of_batches_evaluate_the_same_model(on_ranks: OnRanks) -> None:
    """DDP would exchange buffers at the first batch, which a rank without batches never reaches."""
    (none, _), (two, same_model) = on_ranks(2, _validated_unevenly)
    assert (none, two, same_model) == (0, 2, True)


def test_a_lightning_module_is_refused_with_what_trains_it() -> None:
    with refused(NotImplementedError, "from_ptl", "hpc_det.integrations.lightning", "docs/how-to/lightning.md"):
        TrainingOperator.from_ptl(nn.Module, train_dataloader=[])
