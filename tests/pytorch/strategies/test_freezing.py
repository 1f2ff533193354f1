"""Parameters that are frozen and unfrozen after their model is wrapped: ranks exchange exactly the trained ones."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hpc_det.distributed.collectives import Distributed
from hpc_det.errors import UsageError
from hpc_det.pytorch import PyTorchCallback, PyTorchTrialContext
from hpc_det.pytorch.strategies import ddp
from hpc_det.pytorch.strategies.ddp import DataParallel, data_parallel
from hpc_det.sgd import TrainingOperator
from tests.distributed.ranks import OnRanks
from tests.facts import unnamed
from tests.pytorch.trials import Life, StopAt, Tiny, assert_same
from tests.wait import DEADLINE_S

Change = dict[int, tuple[str, bool]]
"""By batch: the layer that changes, and whether it requires gradients afterwards."""

RECORDS, BATCHES = 12, 6


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 7), nn.Linear(7, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(self.body(inputs).relu())
        return outputs


def new_context(distributed: Distributed, aggregation: int = 1) -> PyTorchTrialContext:
    config = {"optimizations": {"aggregation_frequency": aggregation}}
    spec = {"experiment_id": 1, "trial_id": 1, "trial_seed": 1, "hparams": {}, "config": config}
    return PyTorchTrialContext(spec, distributed)


def weights(model: nn.Module) -> dict[str, Any]:
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in model_state(model)}
    return {name: value.detach().clone() for name, value in whole.items()}


def model_state(model: nn.Module) -> Any:
    return model.state_dict().items()


def trained(
    distributed: Distributed, changes: Change, options: dict[str, Any], aggregation: int, shards: bool = False
) -> dict[str, Any]:
    """Return the weights after some batches, which the ranks share. Only the head is trained at first."""
    torch.manual_seed(1)
    model = Two().double()
    model.body.requires_grad_(False)
    if shards and distributed.size > 1:
        fully_shard(model)
    context = new_context(distributed, aggregation)
    wrapped = context.wrap_model(model, **options)
    optimizer = context.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for batch in range(BATCHES):
        if batch in changes:
            layer, trains = changes[batch]
            model.get_submodule(layer).requires_grad_(trains)
        inputs = torch.randn(RECORDS, 5, dtype=torch.float64)
        share = inputs.chunk(distributed.size)[distributed.rank]

        def step(share: torch.Tensor = share) -> None:
            loss = (wrapped(share) - share.sum(1, keepdim=True)).square().mean()
            context.backward(loss)
            context.step_optimizer(optimizer)

        if (batch + 1) % aggregation:
            with context.keeping_gradients():
                step()
        else:
            step()
    return weights(model)


THAWED: Change = {2: ("body", True)}
FROZEN_AGAIN: Change = {1: ("body", True), 4: ("body", False)}


@pytest.mark.parametrize(
    ("changes", "options", "aggregation"),
    [
        (THAWED, {}, 1),
        (THAWED, {"find_unused_parameters": True}, 1),
        (THAWED, {"gradient_as_bucket_view": True}, 1),
        (THAWED, {"static_graph": True}, 1),
        ({3: ("body", True)}, {}, 2),
        ({3: ("body", True)}, {"find_unused_parameters": True}, 2),
        (FROZEN_AGAIN, {}, 1),
        ({0: ("body", True), 3: ("body", False)}, {}, 2),
        ({1: ("body", True), 2: ("head", False), 4: ("head", True)}, {}, 1),
    ],
)
def test_two_ranks_train_what_one_rank_does(
    on_ranks: OnRanks, changes: Change, options: dict[str, Any], aggregation: int
) -> None:
    first, second = on_ranks(2, trained, changes, options, aggregation)
    alone = trained(Distributed(), changes, {}, aggregation)
    for name, expected in alone.items():
        assert torch.equal(first[name], second[name]), f"ranks differ in {name}"
        torch.testing.assert_close(first[name], expected, rtol=1e-9, atol=1e-12)


def test_a_thawed_layer_of_a_sharded_model_is_trained(on_ranks: OnRanks) -> None:
    first, second = on_ranks(2, trained, THAWED, {}, 1, True)
    alone = trained(Distributed(), THAWED, {}, 1)
    for name, expected in alone.items():
        assert torch.equal(first[name], second[name]), f"ranks differ in {name}"
        torch.testing.assert_close(first[name], expected, rtol=1e-9, atol=1e-12)


class Thaws(PyTorchCallback):
    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        """Unfreeze the first layer in the second epoch, and freeze the last layer in the third."""
        self._model.get_submodule("0").requires_grad_(epoch_idx > 0)
        self._model.get_submodule("4").requires_grad_(epoch_idx < 2)


class Thawed(Tiny):
    """Layers also change between optimizer steps: six batches make an epoch, four a step."""

    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        layers = nn.Linear(5, 8), nn.Dropout(0.3), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1)
        model = nn.Sequential(*layers)
        model[0].requires_grad_(False)
        self.model = context.wrap_model(model, **self.options)
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {"thaws": Thaws(self.context.models[0])}


class ThawedMindingUse(Thawed):
    options: ClassVar = {"find_unused_parameters": True}


def lived(distributed: Distributed, life: Life, stop_at: int) -> list[bytes]:
    loop = life.attempt(StopAt(stop_at), distributed)
    return [value.detach().numpy().tobytes() for value in loop._context.models[0].parameters()]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("trial", "ranks", "aggregation", "tick"),
    [
        (Thawed, 3, 1, 7),
        (Thawed, 2, 4, 7),
        (ThawedMindingUse, 2, 4, 6),
        *(
            pytest.param(trial, 3, aggregation, tick, marks=pytest.mark.long)
            for trial in (Thawed, ThawedMindingUse)
            for aggregation in (1, 4)
            for tick in range(4, 16)
        ),
    ],
)
def test_a_stop_before_and_after_a_thaw_changes_no_bit(
    on_ranks: OnRanks, tmp_path: Path, trial: type[Thawed], ranks: int, aggregation: int, tick: int
) -> None:
    optimizations = {"aggregation_frequency": aggregation}
    undisturbed, life = (
        Life.begin(tmp_path / name, trial, {"global_batch_size": 6}, optimizations=optimizations)
        for name in ("whole", "cut")
    )
    expected = on_ranks(ranks, lived, undisturbed, 999)
    on_ranks(ranks, lived, life, tick)
    assert on_ranks(ranks, lived, life, 999) == expected
    assert expected == [expected[0]] * ranks
    assert_same(life, undisturbed)


def flipped_in_each_batch(distributed: Distributed) -> tuple[list[bytes], int]:
    """Train as a GAN that freezes its discriminator for the generator's step; return the weights and DDP's
    re-creations.
    """
    torch.manual_seed(1)
    judge, maker = nn.Linear(3, 1), nn.Linear(2, 3)
    context = new_context(distributed)
    in_ddp, made = context.wrap_model(judge), context.wrap_model(maker)
    steps = [context.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1)) for model in (judge, maker)]
    for batch in range(4):
        noise = torch.randn(4, 2, generator=torch.Generator().manual_seed(2 * batch + distributed.rank))
        judge.requires_grad_(True)
        context.backward(in_ddp(made(noise).detach()).square().mean())
        context.step_optimizer(steps[0])
        judge.requires_grad_(False)
        context.backward((in_ddp(made(noise)) - 1).square().mean())
        context.step_optimizer(steps[1])
    assert isinstance(in_ddp, DataParallel)
    return [value.detach().numpy().tobytes() for value in (*judge.parameters(), *maker.parameters())], in_ddp._changes


def test_a_model_frozen_as_a_whole_for_a_moment_needs_no_new_set_up(on_ranks: OnRanks) -> None:
    first, second = on_ranks(2, flipped_in_each_batch)
    assert first == second
    assert first[1] == 0


def changed_alone(distributed: Distributed, changing: int) -> str:
    model = Two()
    model.body.requires_grad_(False)
    wrapped = new_context(distributed).wrap_model(model)
    model.body.requires_grad_(True)
    if distributed.rank == changing:
        model.body.bias.requires_grad_(False)
    try:
        wrapped(torch.ones(2, 5))
    except UsageError as error:
        return str(error)
    return ""


def test_ranks_that_thaw_different_parameters_are_told(on_ranks: OnRanks) -> None:
    first, second = on_ranks(2, changed_alone, 1)
    assert "body.weight, body.bias" in first
    assert "rank 0" in first
    assert "4 of 4" in first
    assert "rank 1 3" in first
    assert "rank 1" in second
    assert "3 of 4" in second


def changed_by_one(distributed: Distributed) -> str:
    model = Two()
    model.body.requires_grad_(False)
    wrapped = new_context(distributed).wrap_model(model)
    if distributed.rank == 1:
        distributed.messages.from_rank_0("refused", "refused", limit_s=DEADLINE_S, is_it=lambda value: True)
        own = torch.zeros(2, dtype=torch.int64)
        dist.all_gather([torch.zeros_like(own), torch.zeros_like(own)], own)  # the collective that rank 0 has begun
        return ""
    model.body.requires_grad_(True)
    ddp._WORTH_A_LINE_S = ddp._LIMIT_S = 0
    try:
        wrapped(torch.ones(2, 5))
    except UsageError as error:
        distributed.messages.to_all("refused", None)
        return str(error)
    return ""


def test_a_rank_that_thaws_alone_says_so(on_ranks: OnRanks) -> None:
    text, _ = on_ranks(2, changed_by_one)
    assert "body.weight, body.bias" in text


def thawed_bare(distributed: Distributed) -> tuple[str, str]:
    """Return the errors for a model without trainable parameters, which DDP does not wrap: in a trial, and in an
    operator.
    """
    context, texts = new_context(distributed), []
    teacher = context.wrap_model(Two().requires_grad_(False))
    optimizer = context.wrap_optimizer(torch.optim.SGD(teacher.parameters(), lr=0.1))

    class Operator(TrainingOperator):
        def setup(self, config: dict[str, Any]) -> None:
            model = Two().requires_grad_(False)
            self.model, self.optimizer = self.register(
                models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1)
            )

    rank, size = distributed.rank, distributed.size
    operator = Operator({}, rank, rank, is_distributed=True, wrap_ddp=True, world_size=size)
    for model, step in (
        (teacher, lambda: context.step_optimizer(optimizer)),
        (operator.model, operator.optimizer.step),
    ):
        optimizer.step()
        model.head.requires_grad_(True)
        model(torch.ones(2, 5)).sum().backward()
        with pytest.raises(UsageError) as refused:
            step()
        texts.append(str(refused.value))
        model.zero_grad()
    return texts[0], texts[1]


def test_a_model_thawed_that_was_frozen_as_a_whole_is_an_error(on_ranks: OnRanks) -> None:
    for trial, operator in on_ranks(2, thawed_bare):
        assert unnamed(trial, "head.weight, head.bias", "wrap_model", "freeze") == []
        assert "register" in operator


def thawed_in_an_operator(distributed: Distributed) -> list[bytes]:
    class Operator(TrainingOperator):
        def setup(self, config: dict[str, Any]) -> None:
            torch.manual_seed(1)
            model = Two()
            model.body.requires_grad_(False)
            self.model, self.optimizer, self.criterion = self.register(
                models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1), criterion=nn.MSELoss()
            )

    rank, size = distributed.rank, distributed.size
    operator = Operator({}, rank, rank, is_distributed=True, wrap_ddp=True, world_size=size)
    generator = torch.Generator().manual_seed(rank)
    for epoch in range(2):
        operator._models[0].get_submodule("body").requires_grad_(epoch > 0)
        inputs = [torch.randn(4, 5, generator=generator) for _ in range(2)]
        operator.train_epoch([(each, each.sum(1, keepdim=True)) for each in inputs])
    return [value.detach().numpy().tobytes() for value in operator._models[0].parameters()]


def test_ranks_of_an_operator_exchange_what_is_thawed(on_ranks: OnRanks) -> None:
    first, second = on_ranks(2, thawed_in_an_operator)
    assert first == second


class Replaced(Tiny):
    def __init__(self, context: PyTorchTrialContext) -> None:
        super().__init__(context)
        context.models[0].add_module("4", nn.Linear(8, 1))


def test_a_layer_replaced_after_wrapping_is_an_error(on_ranks: OnRanks, tmp_path: Path) -> None:
    life = Life.begin(tmp_path, Replaced)
    for text in on_ranks(2, refusal, life):
        assert unnamed(text, "wrap_model", "layers", "before") == []


def refusal(distributed: Distributed, life: Life) -> str:
    with pytest.raises(UsageError) as problem:
        life.attempt(StopAt(3), distributed)
    return str(problem.value)


def changed_often(distributed: Distributed) -> list[str]:
    model = Two()
    wrapped = data_parallel(model, distributed.device, {})
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for batch in range(25):
            model.body.requires_grad_(bool(batch % 2))
            wrapped(torch.ones(2, 5)).sum().backward()
    return [str(warning.message) for warning in seen if "frozen or thawed" in str(warning.message)]


def test_what_changes_in_each_batch_is_warned_of_once(on_ranks: OnRanks) -> None:
    assert [len(texts) for texts in on_ranks(2, changed_often)] == [1, 1]


def share_of_a_look(distributed: Distributed) -> float:
    """Return the processor time of the check of a model with 500 unchanged parameters, as a share of that of a forward
    and a backward pass.
    """
    bare, model = (nn.Sequential(*(nn.Linear(2, 2) for _ in range(250))) for _ in range(2))
    wrapped = data_parallel(model, distributed.device, {})
    return _processor_time(wrapped.follow_freezing) / _processor_time(lambda: bare(torch.ones(1, 2)).sum().backward())


def _processor_time(do: Callable[[], object]) -> float:
    """Return the shortest time of a call in 20 rounds of 10 calls."""
    best = float("inf")
    for _ in range(20):
        began = time.thread_time()
        for _ in range(10):
            do()
        best = min(best, (time.thread_time() - began) / 10)
    return best


def test_looking_at_500_parameters_takes_a_small_part_of_a_pass(on_ranks: OnRanks) -> None:
    assert max(on_ranks(2, share_of_a_look)) < 0.01
