"""Everything that a rank has before a batch, as texts by name: see `hpc_det.store.trace_names`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from hpc_det.distributed.rng import rng_state
from hpc_det.pytorch.state.fingerprint import Texts, attributes, is_users, some_texts_of, tensor_text, texts_of
from hpc_det.pytorch.strategies.strategy import Strategy, Trained
from hpc_det.pytorch.trial.trial import Trial
from hpc_det.pytorch.trial.trial_context import TrialContext, parameters_of
from hpc_det.store.trace_names import ATTRIBUTE, GLOBAL, LOADER


class RankState:
    def __init__(self, trial: Trial, context: TrialContext, strategy: Strategy, code: Path) -> None:
        """`code`: the folder of the user's modules."""
        self._trial, self._context, self._strategy = trial, context, strategy
        self._code = (f"{code}/", f"{code.resolve()}/")
        self.built: dict[str, Any] = {}
        """What the trial has built for the loop: `callbacks`, `training_data_loader`, `validation_data_loader`."""

    def texts(self) -> Texts:
        trained = self._strategy.trained()
        found = _saved(trained)
        in_checkpoints = frozenset(map(id, (*self._strategy.owned(), *self._context.reducers.wrapped)))
        for path, value in (*self._attributes(trained), *self._global_variables()):
            found |= some_texts_of(path, value, in_checkpoints)
        return found

    def _attributes(self, trained: Trained) -> Iterator[tuple[str, Any]]:
        for path, owner in self._owners(trained):
            for name, part in attributes(owner):
                yield f"{ATTRIBUTE}{path}{name}", part
        for what, loader in self._loaders():
            yield f"{ATTRIBUTE}{what} {LOADER}generator", getattr(loader, "generator", None)

    def _global_variables(self) -> Iterator[tuple[str, Any]]:
        for module in self._users_modules():
            for name, value in attributes(module):
                yield f"{GLOBAL}{module.__name__}{name}", value

    def _owners(self, trained: Trained) -> Iterator[tuple[str, object]]:
        """Of Python attributes, by the expression that leads to them."""
        yield "trial", self._trial
        for number, model in enumerate(trained.models):
            for name, module in model.named_modules():
                if is_users(module):
                    yield f"model {number}{'.' * bool(name)}{name}", module
        for name, callback in (self.built.get("callbacks") or {}).items():
            yield f"callbacks[{name!r}]", callback
        for what, loader in self._loaders():
            for part in ("dataset", "sampler", "batch_sampler", "collate_fn"):
                yield f"{what} {LOADER}{part}", getattr(loader, part, None)

    def _loaders(self) -> Iterator[tuple[str, Any]]:
        return ((what, self.built.get(f"{what}_data_loader")) for what in ("training", "validation"))

    def _users_modules(self) -> Iterator[ModuleType]:
        for name, module in sys.modules.copy().items():  # other threads import, too
            file = getattr(module, "__file__", None) or ""
            if name == type(self._trial).__module__ or file.startswith(self._code):
                yield module


def _saved(trained: Trained) -> Texts:
    """What checkpoints hold."""
    found = texts_of("generators", rng_state())
    names = _names(trained)
    for number, model in enumerate(trained.models):
        found |= _weights(f"model {number}", model, trained.replaced)
    for number, optimizer in enumerate(trained.optimizers):
        found |= texts_of(f"optimizer {number}", _named(optimizer, names))
    if trained.scaler:
        found |= texts_of("gradient scaler", trained.scaler.state_dict())
    for number, scheduler in enumerate(trained.schedulers):
        found |= texts_of(f"learning rate schedule {number}", scheduler.state_dict())
    return found


def _weights(path: str, model: torch.nn.Module, replaced: frozenset[int]) -> Texts:
    """With buffers that are in no state_dict, and gradients that wait for a step. `replaced`: see Trained."""
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if id(buffer) not in replaced]
    tensors = [*model.named_parameters(), *buffers]
    waiting = [(name, parameter.grad) for name, parameter in model.named_parameters() if parameter.grad is not None]
    found = {f"{path}: {name}": tensor_text(tensor) for name, tensor in tensors}
    return found | {f"gradient of {path}: {name}": tensor_text(gradient) for name, gradient in waiting}


def _names(trained: Trained) -> dict[int, str]:
    """Of parameters, by their ids."""
    return {
        id(parameter): f"{number}.{name}" if number else name
        for number, model in enumerate(trained.models)
        for name, parameter in model.named_parameters()
    }


def _named(optimizer: Any, names: dict[int, str]) -> Any:
    """Its state, by the names of parameters where it is torch's."""
    content = optimizer.state_dict()
    if not isinstance(optimizer, torch.optim.Optimizer):
        return content
    parameters = enumerate(parameters_of(optimizer))
    state = {names.get(id(each), str(number)): optimizer.state.get(each) for number, each in parameters}
    return {"state": state, "groups": content["param_groups"]}
