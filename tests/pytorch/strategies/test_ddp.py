from __future__ import annotations

from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpc_det.core import ddp_buckets
from hpc_det.core.ddp_buckets import settle_buckets
from hpc_det.distributed.collectives import Distributed
from hpc_det.errors import UsageError
from hpc_det.pytorch import PyTorchTrialContext
from hpc_det.pytorch.strategies.ddp import data_parallel, share_buffers, synchronized_batch_norm
from tests.distributed.ranks import OnRanks
from tests.facts import refused, unnamed


class LastFirst(nn.Module):
    """Layers registered in the reverse of their use, so that gradients arrive in another order than DDP expects."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(31, 7)
        self.first = nn.Linear(13, 31)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.second(self.first(inputs).relu())
        return outputs


def plain(model: nn.Module, device: torch.device, options: dict[str, Any]) -> nn.Module:
    return DistributedDataParallel(model, **options)


Wrap = Callable[[nn.Module, torch.device, dict[str, Any]], nn.Module]


def gradients(distributed: Distributed, wrap: Wrap, options: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return the gradients of one batch for the same weights, in the first iteration of a process and a later one."""
    torch.manual_seed(1)
    model = LastFirst()
    inputs = torch.randn(distributed.size, 16, 13)[distributed.rank] * (10.0**distributed.rank)
    wrapped = wrap(model, distributed.device, options)
    found = []
    for _ in range(3):
        wrapped.zero_grad()
        wrapped(inputs).square().mean().backward()
        found.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    return found[0], found[-1]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 1e-4}, {"gradient_as_bucket_view": True}])
def test_the_first_gradients_of_a_process_have_the_bits_of_later_ones(
    on_ranks: OnRanks, options: dict[str, Any]
) -> None:
    ranks = on_ranks(3, gradients, data_parallel, options)
    for first, later in ranks:
        assert len(first) == 4
        assert same(first, later)
        assert same(first, ranks[0][0]), "all ranks have the same sums"


def test_those_of_plain_ddp_do_not(on_ranks: OnRanks) -> None:
    """Control for the test above, which would otherwise prove nothing."""
    assert not all(same(first, later) for first, later in on_ranks(3, gradients, plain, {}))


class OfAnotherTorch(DistributedDataParallel):
    """It rebuilds its buckets elsewhere: its reducer shows no `_rebuild_buckets` while it is wrapped."""

    def __init__(self, model: nn.Module, options: dict[str, Any]) -> None:
        super().__init__(model, **options)
        reducer, self.reducer = self.reducer, object()  # type: ignore[assignment]
        settle_buckets(self)
        self.reducer = reducer


def of_another_torch(model: nn.Module, device: torch.device, options: dict[str, Any]) -> nn.Module:
    return OfAnotherTorch(model, options)


def trained_with_another_torch(distributed: Distributed, missing: str) -> tuple[list[Any], str]:
    wrap: Wrap = of_another_torch
    if missing in ddp_buckets._HOOKS:  # of all parameters: torch itself has to keep it
        ddp_buckets._HOOKS, wrap = (f"{missing}_of_another_torch",), data_parallel
    with redirect_stdout(StringIO()) as printed:
        _, later = gradients(distributed, wrap, {})
    return later, printed.getvalue()


@pytest.mark.parametrize("missing", ["_rebuild_buckets", "_post_accumulate_grad_hooks"])
def test_with_a_ddp_of_other_internals_ranks_train_and_print_what_a_resume_loses(
    on_ranks: OnRanks, missing: str
) -> None:
    known = [later for _, later in on_ranks(3, gradients, plain, {})]
    for (later, printed), expected in zip(on_ranks(3, trained_with_another_torch, missing), known, strict=True):
        assert same(later, expected)
        assert len(printed.splitlines()) == 1
        assert missing in printed


def freshly_wrapped(distributed: Distributed) -> tuple[bool, bool, bool, bool]:
    """Return whether wrapping leaves the weights, the gradients, the output and the generator unchanged."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    for parameter in model[0].parameters():
        parameter.requires_grad = False
    before, noise = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    wrapped = data_parallel(model, distributed.device, {})
    return (
        all(torch.equal(value, before[name]) for name, value in model.state_dict().items()),
        all(parameter.grad is None for parameter in model.parameters()),
        torch.equal(wrapped(torch.ones(4, 3)), model(torch.ones(4, 3))),
        torch.equal(noise, torch.get_rng_state()),
    )


def test_wrapping_changes_nothing_else(on_ranks: OnRanks) -> None:
    assert on_ranks(2, freshly_wrapped) == [(True, True, True, True)] * 2


def trains(distributed: Distributed, options: dict[str, Any]) -> list[float]:
    torch.manual_seed(1)
    model = LastFirst()
    wrapped = data_parallel(model, distributed.device, options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, losses = torch.randn(16, 13), []
    for _ in range(4):
        loss = wrapped(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_every_kind_of_ddp_trains(on_ranks: OnRanks, options: dict[str, Any]) -> None:
    first, second = on_ranks(2, trains, options)
    assert first == second
    assert first == sorted(first, reverse=True)


def frozen(distributed: Distributed) -> float:
    model = LastFirst().requires_grad_(False)
    model.first.bias.requires_grad = True
    wrapped = data_parallel(model, distributed.device, {})
    loss = wrapped(torch.ones(2, 13)).sum()
    loss.backward()
    return float(model.first.bias.grad.sum())  # type: ignore[union-attr]


def test_a_model_with_one_free_parameter_trains(on_ranks: OnRanks) -> None:
    first, second = on_ranks(2, frozen)
    assert first == second != 0


class Patched(torch.nn.Module):
    """A model with a patched forward, a pre-hook that reads its argument, and optionally a sparse table."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(8, 4, sparse=sparse)
        self.forward = lambda numbers: self.table(numbers).sum()
        self.register_forward_pre_hook(lambda _, args: args[0])


def trained_once(distributed: Distributed, sparse: bool) -> tuple[bool, bool]:
    """Return whether the patch is still present, and whether wrapping changed the weights."""
    model = Patched(sparse=sparse)
    before = model.table.weight.detach().clone()
    forward = model.forward
    wrapped = data_parallel(model, distributed.device, {})
    moved = not torch.equal(before, model.table.weight)
    wrapped(torch.tensor([1, 2])).backward()
    return model.forward is forward, moved


@pytest.mark.parametrize("sparse", [False, True])
def test_models_with_hooks_patches_and_sparse_tables_train_as_with_plain_ddp(on_ranks: OnRanks, sparse: bool) -> None:
    assert on_ranks(2, trained_once, sparse) == [(True, False)] * 2


# --- what the wrapper adds


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.title = "own attribute"

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.norm(self.layer(inputs))
        return outputs

    def twice(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.forward(inputs) * 2


def reached(distributed: Distributed) -> tuple[str, bool, str]:
    wrapped = data_parallel(Named(), distributed.device, {})
    try:
        missing = str(wrapped.no_such_name)
    except AttributeError as error:
        missing = str(error)
    return wrapped.title, torch.is_tensor(wrapped.twice(torch.ones(3, 4))), missing


def test_a_wrapped_models_own_attributes_are_in_reach(on_ranks: OnRanks) -> None:
    for title, called, missing in on_ranks(2, reached):
        assert (title, called) == ("own attribute", True)
        assert unnamed(missing, "'Named'", "'no_such_name'") == []


def evaluated(distributed: Distributed) -> float:
    """Rank 0 evaluates twice, rank 1 not at all; then both use a collective."""
    torch.manual_seed(distributed.rank)
    model = Named()
    wrapped = data_parallel(model, distributed.device, {})
    wrapped(torch.randn(8, 4)).sum().backward()
    share_buffers([wrapped])
    wrapped.eval()
    wrapped.alone = True
    with torch.no_grad():
        for _ in range(2 * (1 - distributed.rank)):
            wrapped(torch.ones(2, 4))
    distributed.barrier()
    return float(model.norm.running_mean.sum())  # type: ignore[union-attr]


def test_evaluation_at_each_ranks_own_pace_uses_rank_0s_buffers(on_ranks: OnRanks) -> None:
    first, second = on_ranks(2, evaluated)
    assert first == second != 0


def compressed(distributed: Distributed, compress: bool) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model = LastFirst()
    wrapped = data_parallel(model, distributed.device, {})
    if compress:
        wrapped.compress_gradients()
    inputs = torch.randn(distributed.size, 16, 13)[distributed.rank]
    wrapped(inputs).square().mean().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_compressed_gradients_are_those_of_half_precision(on_ranks: OnRanks) -> None:
    whole, compact = on_ranks(2, compressed, False), on_ranks(2, compressed, True)
    assert all(torch.equal(one, other) for one, other in zip(*compact, strict=True))
    for exact, half in zip(whole[0], compact[0], strict=True):
        assert not torch.equal(exact, half)
        torch.testing.assert_close(half, exact, rtol=2e-3, atol=2e-4)


def through_the_context(distributed: Distributed, config: dict[str, Any], fp16: bool) -> bool:
    """Return whether gradients were rounded to half precision in the exchange."""
    spec = {"experiment_id": 1, "trial_id": 1, "trial_seed": 1, "hparams": {}, "config": config}
    context = PyTorchTrialContext(spec, distributed)
    model = context.wrap_model(nn.Linear(1, 1, bias=False))
    context.wrap_optimizer(torch.optim.SGD(model.parameters()), fp16_compression=fp16)
    context.backward(model(torch.tensor([[1.0001]])).sum())
    gradient = context.models[0].get_parameter("weight").grad
    assert gradient is not None
    return gradient.item() == 1.0


@pytest.mark.parametrize(
    ("compression", "of_optimizer", "rounded"), [(False, False, False), (True, False, True), (False, True, True)]
)
def test_the_config_or_an_optimizer_asks_for_compression(
    on_ranks: OnRanks, compression: bool, of_optimizer: bool, rounded: bool
) -> None:
    config = {"optimizations": {"gradient_compression": compression}}
    assert on_ranks(2, through_the_context, config, of_optimizer) == [rounded, rounded]


def test_batch_norm_over_all_ranks_needs_gpus() -> None:
    with refused(UsageError, "sync_batch_norm=True", "GPUs", "CPUs"):
        synchronized_batch_norm(Named(), torch.device("cpu"))


def wrapped_oddly(distributed: Distributed) -> tuple[bool, str, float]:
    """Wrap a frozen teacher, a static graph, and a model with two optimizers that compress; return the results."""
    spec = {"experiment_id": 1, "trial_id": 1, "trial_seed": 1, "hparams": {}}
    aggregating = PyTorchTrialContext({**spec, "config": {"optimizations": {"aggregation_frequency": 2}}}, distributed)
    try:
        aggregating.wrap_model(nn.Linear(1, 1), static_graph=True)
        refusal = ""
    except UsageError as error:
        refusal = str(error)
    context = PyTorchTrialContext({**spec, "config": {}}, distributed)
    teacher = nn.Linear(1, 1).requires_grad_(False)
    model = context.wrap_model(nn.Linear(1, 1))
    for parameter in model.parameters():
        context.wrap_optimizer(torch.optim.SGD([parameter]), fp16_compression=True)
    context.backward(model(torch.ones(1, 1)).sum())
    gradient = context.models[0].get_parameter("weight").grad
    assert gradient is not None
    return context.wrap_model(teacher) is teacher, refusal, gradient.item()


def test_what_ddp_would_refuse_in_its_own_words_works_or_is_refused_in_ours(on_ranks: OnRanks) -> None:
    for is_bare, refusal, gradient in on_ranks(2, wrapped_oddly):
        assert is_bare, "nothing of a frozen model is exchanged"
        assert unnamed(refusal, "wrap_model: ", "static_graph=True", "optimizations.aggregation_frequency 2") == []
        assert gradient == 1.0
