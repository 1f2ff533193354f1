from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from hpc_det.distributed.collectives import Distributed
from hpc_det.errors import UsageError
from hpc_det.pytorch import LRScheduler, PyTorchTrialContext
from hpc_det.pytorch.strategies.device import ToDevice
from tests.facts import each_names, refused, warned

EVERY_EPOCH, EVERY_BATCH = LRScheduler.StepMode.STEP_EVERY_EPOCH, LRScheduler.StepMode.STEP_EVERY_BATCH
BY_HAND = LRScheduler.StepMode.MANUAL_STEP

SPEC = {
    "experiment_id": 12,
    "trial_id": 3,
    "trial_seed": 777,
    "hparams": {"global_batch_size": 65, "learning_rate": 0.1, "layers": [1, 2]},
    "config": {"name": "digits", "data": {"url": "somewhere"}},
}


@pytest.fixture
def context() -> PyTorchTrialContext:
    return PyTorchTrialContext(SPEC, Distributed())


@pytest.fixture
def optimizer(context: PyTorchTrialContext) -> torch.optim.SGD:
    model = context.wrap_model(nn.Linear(2, 1))
    return context.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))


# --- information


def test_a_trial_learns_who_it_is(context: PyTorchTrialContext) -> None:
    assert context.get_experiment_id() == 12
    assert context.get_trial_id() == 3
    assert context.get_trial_seed() == 777
    assert context.get_experiment_config()["name"] == "digits"
    assert context.get_data_config() == {"url": "somewhere"}
    assert context.get_hparams() == SPEC["hparams"]
    assert context.get_hparam("layers") == [1, 2]
    assert context.device == torch.device("cpu")


def test_the_remainder_of_the_global_batch_is_dropped(context: PyTorchTrialContext) -> None:
    assert context.get_global_batch_size() == context.get_per_slot_batch_size() == 65
    of_four = PyTorchTrialContext(SPEC, Distributed(size=4))
    assert (of_four.get_global_batch_size(), of_four.get_per_slot_batch_size()) == (65, 16)


def test_an_unknown_hyperparameter_is_named_with_those_there_are(context: PyTorchTrialContext) -> None:
    with refused(UsageError, "hyperparameters.dropout: ", ["global_batch_size", "layers", "learning_rate"]):
        context.get_hparam("dropout")
    with refused(UsageError, "hyperparameters.5: "):
        context.get_hparam(5)  # type: ignore[arg-type] # as from a loop over numbers


def test_changing_what_was_returned_changes_no_config(context: PyTorchTrialContext) -> None:
    for answer in (context.get_hparams, context.get_experiment_config, context.get_data_config):
        answer().clear()
        assert answer()


def test_batch_and_epoch_are_known_in_training_only(context: PyTorchTrialContext) -> None:
    questions = [
        context.current_train_batch,
        context.current_train_epoch,
        context.is_epoch_start,
        context.is_epoch_end,
        context.get_initial_batch,
    ]
    for question in questions:
        with refused(UsageError, "batches", "epochs", "training"):
            question()
    context.begin_training(20)
    context.begin_epoch(2, first=None, last=26)
    context.batch = 25
    assert [question() for question in questions] == [25, 2, False, False, 20]
    context.batch = 26
    assert [question() for question in questions] == [26, 2, False, True, 20]


def test_a_global_batch_below_the_slots_is_refused() -> None:
    context = PyTorchTrialContext(SPEC, Distributed(size=66))
    with refused(UsageError, "global_batch_size: ", 65, "66 slots"):
        context.get_per_slot_batch_size()


def test_asking_for_the_global_batch_size_as_a_hyperparameter_is_warned_about(context: PyTorchTrialContext) -> None:
    with warned(UserWarning, "get_per_slot_batch_size()"):
        assert context.get_hparam("global_batch_size") == 65


def test_a_stop_can_be_asked_for_and_taken_back(context: PyTorchTrialContext) -> None:
    assert not context.get_stop_requested()
    context.set_stop_requested(True)
    assert context.get_stop_requested()
    context.set_stop_requested(False)
    assert not context.get_stop_requested()


def test_a_stop_is_a_truth_value(context: PyTorchTrialContext) -> None:
    wrong: Any = 1
    with refused(UsageError, "set_stop_requested: ", 1, True, False):
        context.set_stop_requested(wrong)


def test_tensorboard_files_of_reports_can_be_switched_off(context: PyTorchTrialContext) -> None:
    context.set_enable_tensorboard_logging(False)
    assert not context.get_enable_tensorboard_logging()


# --- off cluster

SPACE = {
    "global_batch_size": 32,
    "layers": {"type": "int", "minval": 2, "maxval": 4},
    "rate": {"type": "log", "base": 10, "minval": -4, "maxval": -2},
    "dropout": {"type": "double", "minval": 0.1, "maxval": 0.2},
    "head": {"kind": {"type": "categorical", "vals": ["a", "b"]}, "width": {"type": "const", "val": 7}},
}


def test_a_context_from_a_config_draws_hyperparameters_from_their_ranges() -> None:
    drawn = [PyTorchTrialContext.from_config({"hyperparameters": SPACE, "data": {"x": 1}}) for _ in range(50)]
    assert {context.get_hparam("layers") for context in drawn} == {2, 3, 4}
    assert {context.get_hparam("head")["kind"] for context in drawn} == {"a", "b"}
    for context in drawn:
        assert 1e-4 <= context.get_hparam("rate") <= 1e-2
        assert 0.1 <= context.get_hparam("dropout") <= 0.2
        assert context.get_hparam("head")["width"] == 7
        assert context.get_per_slot_batch_size() == 32
        assert context.get_data_config() == {"x": 1}


def test_a_context_from_a_config_gives_back_what_it_wraps() -> None:
    context = PyTorchTrialContext.from_config({})
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    assert context.wrap_model(model) is model
    assert context.wrap_optimizer(optimizer) is optimizer
    assert context.distributed.gather("x") == ["x"]


# --- wrapping


def test_wrapped_objects_are_kept_in_order(context: PyTorchTrialContext) -> None:
    models: list[nn.Module] = [nn.Linear(1, 1), nn.Linear(2, 2)]
    wrapped = [context.wrap_model(model) for model in models]
    assert context.models == models
    assert context.wrapped_models == wrapped
    optimizers = [context.wrap_optimizer(torch.optim.SGD(model.parameters())) for model in wrapped]
    assert context.optimizers == optimizers


def test_a_scheduler_needs_its_optimizer_wrapped(context: PyTorchTrialContext) -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
    context.wrap_optimizer(torch.optim.SGD(nn.Linear(1, 1).parameters()))
    with refused(UsageError, "StepLR", "wrap_optimizer"):
        context.wrap_lr_scheduler(lr_scheduler.StepLR(optimizer, 1), EVERY_EPOCH)


def test_nothing_is_wrapped_twice(context: PyTorchTrialContext, optimizer: torch.optim.SGD) -> None:
    with refused(UsageError, "wrap_model: ", "Linear", "already"):
        context.wrap_model(context.models[0])
    with refused(UsageError, "wrap_optimizer: ", "SGD", "already"):
        context.wrap_optimizer(optimizer)
    scheduler = context.wrap_lr_scheduler(lr_scheduler.StepLR(optimizer, 1), EVERY_EPOCH)
    with refused(UsageError, "wrap_lr_scheduler: ", "StepLR", "already"):
        context.wrap_lr_scheduler(scheduler, EVERY_EPOCH)


def test_fewer_than_one_backward_pass_is_refused(context: PyTorchTrialContext) -> None:
    with refused(UsageError, "backward_passes_per_step", 0, 1):
        context.wrap_optimizer(torch.optim.SGD(nn.Linear(1, 1).parameters()), backward_passes_per_step=0)


@pytest.mark.parametrize("mode", [EVERY_EPOCH, EVERY_BATCH])
def test_reduce_on_plateau_is_stepped_by_hand_only(
    context: PyTorchTrialContext, optimizer: torch.optim.SGD, mode: LRScheduler.StepMode
) -> None:
    with refused(UsageError, "ReduceLROnPlateau", "MANUAL_STEP"):
        context.wrap_lr_scheduler(lr_scheduler.ReduceLROnPlateau(optimizer), mode)
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer)
    assert context.wrap_lr_scheduler(plateau, BY_HAND) is plateau


def test_a_frequency_of_zero_is_refused(context: PyTorchTrialContext, optimizer: torch.optim.SGD) -> None:
    with refused(UsageError, "frequency", 0, 1):
        context.wrap_lr_scheduler(lr_scheduler.StepLR(optimizer, 1), EVERY_BATCH, frequency=0)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]] = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 2, 4]),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 5),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.1, 0.5, cycle_momentum=False),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer, 0.1), lr_scheduler.ExponentialLR(optimizer, 0.9)], [3]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_of_torch_comes_back_from_a_checkpoint(name: str) -> None:
    def fresh() -> tuple[Any, Any]:
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
        return optimizer, SCHEDULERS[name](optimizer)

    def rates(optimizer: Any, scheduler: Any, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            found.append(optimizer.param_groups[0]["lr"])
        return found

    optimizer, scheduler = fresh()
    rates(optimizer, scheduler, 4)
    file = io.BytesIO()
    torch.save([optimizer.state_dict(), scheduler.state_dict()], file)
    file.seek(0)
    resumed_optimizer, resumed = fresh()
    for owner, state in zip((resumed_optimizer, resumed), torch.load(file, weights_only=True), strict=True):
        owner.load_state_dict(state)
    assert rates(resumed_optimizer, resumed, 8) == rates(optimizer, scheduler, 8)


# --- in train_batch


class Pair(NamedTuple):
    image: Any
    label: Any


def test_nested_data_goes_to_the_device_and_keeps_its_shape(context: PyTorchTrialContext) -> None:
    tensor = torch.ones(2)
    data = {
        "list": [tensor, (tensor, "text")],
        "pair": Pair(tensor, 3),
        "array": np.arange(3.0),
        "names": np.array(["a", "b"]),
        "none": None,
    }
    with warned(UserWarning, "to_device: ") as given:
        moved = context.to_device([data, data])[0]
    types = [["str"], ["int"], ["ndarray"], ["NoneType"]]
    each_names([str(warning.message) for warning in given], *types)
    assert moved["list"][0] is tensor
    assert moved["list"][1] == (tensor, "text")
    assert isinstance(moved["pair"], Pair)
    assert moved["pair"].label == 3
    assert torch.equal(moved["array"], torch.arange(3, dtype=torch.float64))
    assert moved["names"] is data["names"]
    assert moved["none"] is None
    assert isinstance(data["array"], np.ndarray), "the user's own data is left as it is"


def test_everything_goes_to_another_device() -> None:
    with warned(UserWarning, "str"):
        moved = ToDevice(torch.device("meta"))([torch.ones(1), {"x": (np.ones(1), Pair(torch.ones(1), "text"))}])
    assert moved[0].device.type == moved[1]["x"][0].device.type == moved[1]["x"][1].image.device.type == "meta"


@pytest.fixture
def trained(context: PyTorchTrialContext) -> tuple[nn.Parameter, torch.optim.SGD]:
    """Return a parameter of 0 with a gradient of 3, and its optimizer."""
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = context.wrap_optimizer(torch.optim.SGD([parameter], lr=1.0))
    context.backward((3 * parameter).sum())
    return parameter, optimizer


Trained = tuple[nn.Parameter, torch.optim.SGD]


def test_a_step_moves_and_zeroes(context: PyTorchTrialContext, trained: Trained) -> None:
    parameter, optimizer = trained
    context.step_optimizer(optimizer)
    assert parameter.item() == -3
    assert parameter.grad is None


def test_gradients_stay_on_request(context: PyTorchTrialContext, trained: Trained) -> None:
    parameter, optimizer = trained
    context.step_optimizer(optimizer, auto_zero_grads=False)
    assert parameter.grad is not None
    assert parameter.grad.item() == 3


def test_gradients_are_clipped_before_the_step(context: PyTorchTrialContext, trained: Trained) -> None:
    parameter, optimizer = trained
    context.step_optimizer(optimizer, clip_grads=lambda parameters: nn.utils.clip_grad_value_(parameters, 2.0))
    assert parameter.item() == -2


def test_backward_can_keep_the_graph(context: PyTorchTrialContext) -> None:
    parameter = nn.Parameter(torch.ones(1))
    loss = (parameter**2).sum()
    context.backward(loss, retain_graph=True)
    context.backward(loss, create_graph=False)
    assert parameter.grad is not None
    assert parameter.grad.item() == 4


# --- gradients of several batches


def aggregated(average: bool, *, of_optimizer: bool | None = None) -> float:
    """Return the value of a parameter after batches with gradients 3, 5 and 100, and a step after every second one."""
    optimizations = {"aggregation_frequency": 2, "average_aggregated_gradients": average}
    context = PyTorchTrialContext({**SPEC, "config": {"optimizations": optimizations}}, Distributed())
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = context.wrap_optimizer(torch.optim.SGD([parameter], lr=1.0), average_aggregated_gradients=of_optimizer)
    for gradient, steps_now in ((3, False), (5, True), (100, False)):
        with contextlib.nullcontext() if steps_now else context.keeping_gradients():
            context.backward((gradient * parameter).sum())
            context.step_optimizer(optimizer)
    return parameter.item()


def test_aggregated_gradients_are_averaged_or_summed() -> None:
    assert aggregated(average=True) == -4
    assert aggregated(average=False) == -8


def test_an_optimizer_overrides_whether_its_gradients_are_averaged() -> None:
    assert aggregated(average=True, of_optimizer=False) == -8
    assert aggregated(average=False, of_optimizer=True) == -4


def test_gradients_that_stay_do_not_go_with_aggregation() -> None:
    context = PyTorchTrialContext({**SPEC, "config": {"optimizations": {"aggregation_frequency": 4}}}, Distributed())
    optimizer = context.wrap_optimizer(torch.optim.SGD([nn.Parameter(torch.zeros(1))]))
    with refused(UsageError, "auto_zero_grads=False", "aggregation_frequency 4"):
        context.step_optimizer(optimizer, auto_zero_grads=False)


def test_an_optimizer_that_is_not_wrapped_is_not_stepped() -> None:
    context = PyTorchTrialContext.from_config({})
    model = context.wrap_model(torch.nn.Linear(1, 1))
    own = torch.optim.SGD(model.parameters())
    context.wrap_optimizer(torch.optim.Adam(model.parameters()))
    context.backward(model(torch.ones(1, 1)).sum())
    with refused(UsageError, "SGD", "context.wrap_optimizer"):
        context.step_optimizer(own)
    assert all(parameter.grad is not None for parameter in model.parameters())
