from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from hpc_det.distributed.collectives import Distributed
from hpc_det.errors import UsageError
from hpc_det.pytorch import PyTorchTrialContext
from hpc_det.pytorch.strategies.amp import as_float32
from tests.facts import refused

SPEC = {"experiment_id": 1, "trial_id": 1, "trial_seed": 1, "hparams": {}, "config": {}}


@pytest.fixture
def context() -> PyTorchTrialContext:
    return PyTorchTrialContext(SPEC, Distributed())


class Probe(nn.Module):
    """A linear layer that records the type in which it computed."""

    layer: nn.Linear

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.computed_in: torch.dtype | None = None

    def forward(self, inputs: torch.Tensor) -> dict[str, Any]:
        output = self.layer(inputs)
        self.computed_in = output.dtype
        if torch.isnan(inputs).any():
            raise ArithmeticError
        return {"outputs": [output]}


class Pair(NamedTuple):
    first: torch.Tensor
    second: int


def train(
    context: PyTorchTrialContext, model: nn.Module, optimizer: torch.optim.Optimizer, factor: float = 0.01
) -> None:
    loss = model(torch.ones(3, 4))["outputs"][0].square().sum() * factor
    context.backward(loss)
    context.step_optimizer(optimizer)
    context.precision.end_batch()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_models_compute_in_half_and_give_float32(context: PyTorchTrialContext, dtype: torch.dtype) -> None:
    context.experimental.use_amp(dtype)
    model = context.wrap_model(Probe())
    assert model(torch.ones(3, 4))["outputs"][0].dtype == torch.float32
    assert model.computed_in == dtype
    assert not torch.is_autocast_enabled("cpu")


def test_a_cpu_computes_in_bfloat16_by_default(context: PyTorchTrialContext) -> None:
    context.experimental.use_amp()
    model = context.wrap_model(Probe())
    model(torch.ones(3, 4))
    assert model.computed_in == torch.bfloat16
    assert context.precision.scaler is None


def test_autocast_ends_also_when_the_model_raises(context: PyTorchTrialContext) -> None:
    context.experimental.use_amp()
    model = context.wrap_model(Probe())
    with pytest.raises(ArithmeticError):
        model(torch.full((3, 4), torch.nan))
    assert not torch.is_autocast_enabled("cpu")
    assert model(torch.ones(3, 4))["outputs"][0].dtype == torch.float32


def test_a_copy_of_a_model_computes_by_itself(context: PyTorchTrialContext) -> None:
    context.experimental.use_amp()
    model = context.wrap_model(Probe())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.layer.weight.zero_()
        twin.layer.bias.zero_()
    assert twin(torch.ones(3, 4))["outputs"][0].abs().sum() == 0
    assert model(torch.ones(3, 4))["outputs"][0].abs().sum() > 0


def test_float16_losses_are_scaled_and_steps_are_not(context: PyTorchTrialContext) -> None:
    context.experimental.use_amp(torch.float16)
    model = context.wrap_model(Probe())
    optimizer = context.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    reference = copy.deepcopy(model)
    train(context, model, optimizer)
    (reference(torch.ones(3, 4))["outputs"][0].square().sum() * 0.01).backward()
    for trained, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert other.grad is not None
        torch.testing.assert_close(other - trained, other.grad, rtol=0.01, atol=1e-5)


def test_a_step_whose_gradients_overflow_is_left_out_and_the_scale_shrinks(context: PyTorchTrialContext) -> None:
    context.experimental.use_amp(torch.float16)
    model = context.wrap_model(Probe())
    optimizer = context.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    before = copy.deepcopy(model.state_dict())
    scaler = context.precision.scaler
    assert scaler is not None
    scale = scaler.get_scale()
    train(context, model, optimizer, factor=1e38)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert scaler.get_scale() == scale / 2


def test_clipping_sees_unscaled_gradients(context: PyTorchTrialContext) -> None:
    context.experimental.use_amp(torch.float16)
    model = context.wrap_model(Probe())
    optimizer = context.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.0))
    norms = []
    context.backward(model(torch.ones(3, 4))["outputs"][0].sum() * 0.01)
    context.step_optimizer(optimizer, lambda parameters: norms.append(nn.utils.clip_grad_norm_(parameters, 1e9)))
    assert float(norms[0]) == pytest.approx(0.03 * 10**0.5, rel=1e-2)


def test_a_trial_may_scale_by_itself(context: PyTorchTrialContext) -> None:
    scaler = context.wrap_scaler(torch.amp.GradScaler("cpu"))
    model = context.wrap_model(nn.Linear(4, 2))
    optimizer = context.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    before = model.bias.detach().clone()
    context.backward(scaler.scale(model(torch.ones(1, 4)).sum()))
    context.step_optimizer(optimizer, scaler=scaler)
    scaler.update()
    context.precision.end_batch()
    torch.testing.assert_close(model.bias, before - 1.0)


def test_precision_is_set_once_and_before_any_model(context: PyTorchTrialContext) -> None:
    context.experimental.use_amp()
    with refused(UsageError, "use_amp: ", "already", "wrap_scaler"):
        context.experimental.use_amp()
    with refused(UsageError, "wrap_scaler: ", "already", "use_amp"):
        context.wrap_scaler(torch.amp.GradScaler("cpu"))


def test_precision_after_a_model_is_too_late(context: PyTorchTrialContext) -> None:
    context.wrap_model(nn.Linear(1, 1))
    with refused(UsageError, "use_amp: ", "before wrap_model"):
        context.experimental.use_amp()
    with refused(UsageError, "wrap_scaler: ", "before wrap_model"):
        context.wrap_scaler(torch.amp.GradScaler("cpu"))


def test_other_types_are_no_mixed_precision(context: PyTorchTrialContext) -> None:
    with refused(UsageError, "use_amp: ", "torch.float64", "torch.float16", "torch.bfloat16"):
        context.experimental.use_amp(torch.float64)


def test_halves_become_float32_at_any_depth() -> None:
    half, whole = torch.ones(1, dtype=torch.float16), torch.ones(1, dtype=torch.int64)
    data = as_float32({"a": [half, (whole, Pair(half.bfloat16(), 3))], "b": "text"})
    assert data["a"][0].dtype == data["a"][1][1].first.dtype == torch.float32
    assert data["a"][1][0] is whole
    assert isinstance(data["a"][1][1], Pair)
    assert data["b"] == "text"


def test_apex_is_off_or_an_error_that_names_what_to_use(context: PyTorchTrialContext) -> None:
    model, optimizers = nn.Linear(1, 1), [object()]
    assert context.configure_apex_amp(model, optimizers, opt_level="O0") == (model, optimizers)
    assert context.configure_apex_amp(model, optimizers, enabled=False) == (model, optimizers)
    with refused(UsageError, "opt_level", "'O1'", "context.experimental.use_amp()", "before wrap_model"):
        context.configure_apex_amp(model, optimizers)
