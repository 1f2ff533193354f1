"""Mixed precision on a CPU, with torch's gradient scaler as on a GPU, and with a stand-in for apex."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from hpc_det.errors import UsageError
from hpc_det.sgd.operator.options import Amp, Precision
from tests.facts import refused
from tests.sgd.operators import batches, classifier

CPU = torch.device("cpu")


def test_a_cpu_computes_in_bfloat16_without_a_scaler() -> None:
    operator = classifier(use_fp16=True)
    computed_in: list[torch.dtype] = []
    operator.model.register_forward_hook(lambda module, inputs, output: computed_in.append(output.dtype))
    operator.train_epoch(batches(4))
    operator.validate(batches(4))
    assert computed_in == [torch.bfloat16] * 2
    assert operator.model.weight.dtype == torch.float32
    assert operator._amp_scaler is not None
    assert not operator._amp_scaler.is_enabled()
    assert (operator.use_fp16, operator.use_fp16_native, operator.use_fp16_apex) == (True, True, False)


def test_without_fp16_the_helpers_are_what_a_plain_loop_does() -> None:
    operator = classifier()
    features, target = batches(4)[0]
    with operator.autocast():
        loss = operator.criterion(operator.model(features), target)
    assert loss.dtype == torch.float32
    operator.backward(loss)
    before, gradient = operator.model.bias.detach().clone(), operator.model.bias.grad.clone()
    operator.unscale(operator.optimizer)
    operator.step(operator.optimizer)
    assert torch.equal(operator.model.bias, before - gradient)
    assert (operator._precision, operator._amp, operator._amp_scaler) == (None, None, None)


@pytest.mark.gpu
def test_a_gpu_computes_in_float16_and_scales_losses() -> None:
    operator = classifier(use_fp16=True, use_gpu=True)
    computed_in: list[torch.dtype] = []
    operator.model.register_forward_hook(lambda module, inputs, output: computed_in.append(output.dtype))
    result = operator.train_epoch(batches(4, 4, 4))
    assert computed_in == [torch.float16] * 3
    assert result["train_loss"] < 10
    assert operator._precision is not None
    assert operator._precision.state_dict()["scale"] >= 2**14


# --- the scaler


@pytest.fixture
def scaling() -> Amp:
    """Return mixed precision as on a GPU, with a scale that doubles at each update."""
    amp = Amp(CPU)
    amp.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    return amp


def a_step(precision: Precision, value: float = 1.0) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    parameter = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    precision.backward(parameter * value)
    return parameter, optimizer


def test_gradients_are_scaled_and_steps_are_not(scaling: Amp) -> None:
    parameter, optimizer = a_step(scaling)
    assert parameter.grad == 4.0
    scaling.step(optimizer)
    assert parameter == -1.0


def test_true_gradients_are_there_to_be_clipped(scaling: Amp) -> None:
    parameter, optimizer = a_step(scaling)
    scaling.unscale(optimizer)
    assert parameter.grad == 1.0
    scaling.step(optimizer)
    assert parameter == -1.0


def test_the_scale_stays_for_all_optimizers_of_a_batch(scaling: Amp) -> None:
    (first, its_own), (second, of_second) = a_step(scaling), a_step(scaling)
    scaling.step(its_own)
    scaling.step(of_second)
    assert [first.item(), second.item()] == [-1.0, -1.0]
    assert scaling.scaler.get_scale() == 4.0
    third, _ = a_step(scaling)
    assert third.grad == 8.0


def test_a_step_with_infinite_gradients_is_left_out(scaling: Amp) -> None:
    parameter, optimizer = a_step(scaling, float("inf"))
    scaling.step(optimizer)
    assert parameter == 0.0
    assert scaling.state_dict()["scale"] == 2.0


def test_the_scale_is_part_of_the_state(scaling: Amp) -> None:
    _, optimizer = a_step(scaling)
    scaling.step(optimizer)
    restored = Amp(CPU)
    restored.scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    restored.load_state_dict(scaling.state_dict())
    assert restored.scaler.get_scale() == 8.0


def test_a_state_with_a_scale_and_one_without_go_from_gpus_to_cpus_and_back(scaling: Amp) -> None:
    on_cpu = Amp(CPU)
    on_cpu.load_state_dict(scaling.state_dict())
    scaling.load_state_dict(on_cpu.state_dict())
    assert on_cpu.state_dict() == {}
    assert scaling.scaler.get_scale() == 4.0


# --- apex


@pytest.mark.parametrize("kind", [ImportError, UsageError])
def test_apex_that_is_not_there_is_said_with_the_remedy(kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apex", None)
    with refused(kind, "use_fp16", "'apex'", "True"):
        classifier(use_fp16="apex")


class StandIn(ModuleType):
    """A stand-in for apex.amp that records its calls."""

    def initialize(self, models: list[Any], optimizers: list[Any], **options: Any) -> None:
        self.initialized = models, optimizers, options

    def scale_loss(self, loss: torch.Tensor, optimizers: list[Any]) -> AbstractContextManager[torch.Tensor]:
        self.scaled_for = optimizers
        return nullcontext(loss * 2)

    def state_dict(self) -> dict[str, Any]:
        return {"loss_scaler0": 7}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


def test_apex_prepares_models_and_scales_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    apex, amp = ModuleType("apex"), StandIn("apex.amp")
    apex.amp = amp  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "apex", apex)
    operator = classifier(use_fp16="apex")
    operator.register(models=operator.model, optimizers=operator.optimizer, apex_args={"opt_level": "O2"})
    assert amp.initialized == ([operator.model], [operator.optimizer], {"opt_level": "O2"})
    parameter, optimizer = a_step(operator._precision)  # type: ignore[arg-type]
    operator.step(optimizer)
    assert (parameter.item(), amp.scaled_for) == (-2.0, [operator.optimizer])
    assert operator._precision is not None
    operator._precision.load_state_dict(operator._precision.state_dict())
    assert amp.loaded == {"loss_scaler0": 7}
    assert (operator._amp, operator.use_fp16_apex) == (amp, True)
