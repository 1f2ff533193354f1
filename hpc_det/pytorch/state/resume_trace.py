"""The traces that `hpc-det experiment verify-resume` compares: a line for each batch, written by each rank.

  {"batch": 7, "attempt": 2, "first": true,      first batch of its attempt: a resume, unless the batch is 0
   "state": {"model 0: fc.bias": "float32 (10,) 5d0f...", "attribute trial.ema": "0.25", ...},    before the batch
   "data": {"[0]": "float32 (32, 4) 81aa...", ...},        data of the batch
   "metrics": {"['loss']": "float32 0.693..."}}            metrics that the trial returned

The last line contains only the state at the end of the training. Other trainings execute none of this code: it replaces
methods of the strategy and of the trial.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from hpc_det.core.state_dicts import parameters_of
from hpc_det.distributed.preempt import ForcedStop
from hpc_det.distributed.rng import rng_state
from hpc_det.node.files import make_folder
from hpc_det.node.json_files import append_line
from hpc_det.pytorch.state.fingerprint import Texts, attributes, is_users, some_texts_of, tensor_text, texts_of
from hpc_det.pytorch.strategies.strategy import Trained
from hpc_det.pytorch.trial.trial import BuiltTrial
from hpc_det.store.attempt import request_stop
from hpc_det.store.folders import TrialFolder
from hpc_det.store.trace_names import ATTRIBUTE, GLOBAL, LOADER


class ResumeTrace:
    """Writes the trace of one rank, and stops the training after given batches."""

    def __init__(
        self,
        built: BuiltTrial,
        stop: ForcedStop,
        stops: frozenset[int],
        folder: TrialFolder,
        attempt: int,
    ) -> None:
        """Create it before the loop. `stops`: numbers of batches after which the training is stopped."""
        self._state = RankState(built, folder.experiment().code)
        self._is_chief = built.context.distributed.is_chief
        self._stop, self._stops = stop, stops
        self._folder, self._attempt = folder, attempt
        self._file = folder.resume_trace(built.context.distributed.rank)
        self._is_first = True
        self._data: Texts = {}
        self._drawn = 0
        make_folder(self._file.parent)
        self._replace(built.strategy, "begin", self._begin)
        self._replace(built.strategy, "train_batch", self._train_batch)
        self._replace(built.strategy, "end_batch", self._end_batch)
        for what in ("callbacks", "training_data_loader", "validation_data_loader"):
            self._replace(built.trial, f"build_{what}", self._noted(what))

    def end(self, kind: str, steps: int) -> None:
        """Record that the loop has ended with `kind`, see `hpc_det.pytorch.loop.loop.Loop.end`."""
        if kind == "finished":
            self._write(steps, state=self._state.texts())
        elif self._stop.is_forced and self._is_chief:
            source = f"verify-resume on {socket.gethostname()}"
            request_stop(self._folder.stop, attempt=self._attempt, reason="resume check", source=source)

    def _replace(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        setattr(owner, name, lambda *arguments: around(original, *arguments))

    def _noted(self, what: str) -> Callable[..., Any]:
        def build(original: Callable[[], Any]) -> Any:
            self._state.built[what] = built = original()
            return built

        return build

    def _begin(self, original: Any, data: Any, batches: Iterator[Any] | None, progress: Any) -> Any:
        return original(data, batches and self._seen(batches), progress)

    def _seen(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches, recording their data. A training batch may consist of several batches of the loader."""
        for batch in batches:
            self._drawn += 1
            self._data |= texts_of(f"batch {self._drawn}: " * (self._drawn > 1), batch)
            yield batch

    def _train_batch(self, original: Any, batches: Any, epoch: int, number: int) -> Any:
        state, self._data, self._drawn = self._state.texts(), {}, 0
        metrics, records = original(batches, epoch, number)
        self._write(number, state=state, data=self._data, metrics=texts_of("", metrics))
        return metrics, records

    def _end_batch(self, original: Any, number: int) -> None:
        original(number)
        if number + 1 in self._stops:
            self._stop.force()

    def _write(self, batch: int, **parts: Texts) -> None:
        line = {"batch": batch, "attempt": self._attempt, "first": self._is_first, **parts}
        append_line(self._file, line, durable=False)
        self._is_first = False


class RankState:
    """The values on one rank that must be the same after a resume as without it."""

    def __init__(self, built: BuiltTrial, code: Path) -> None:
        """`code`: the folder of the user's modules."""
        self._trial, self._context, self._strategy = built.trial, built.context, built.strategy
        self._code = (f"{code}/", f"{code.resolve()}/")
        self.built: dict[str, Any] = {}
        """Objects that the trial built for the loop: `callbacks`, `training_data_loader`, `validation_data_loader`."""

    def texts(self) -> Texts:
        """Return the texts of all values: of what checkpoints contain, then of attributes and global variables."""
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
        """Yield the objects whose Python attributes are compared, by the expression that leads to them."""
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
    """Return the values that checkpoints contain."""
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
    """Return the weights, buffers that are in no state_dict, and gradients before their step. `replaced`:
    see Trained.
    """
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if id(buffer) not in replaced]
    tensors = [*model.named_parameters(), *buffers]
    waiting = [(name, parameter.grad) for name, parameter in model.named_parameters() if parameter.grad is not None]
    found = {f"{path}: {name}": tensor_text(tensor) for name, tensor in tensors}
    return found | {f"gradient of {path}: {name}": tensor_text(gradient) for name, gradient in waiting}


def _names(trained: Trained) -> dict[int, str]:
    """Return the names of parameters by their ids."""
    return {
        id(parameter): f"{number}.{name}" if number else name
        for number, model in enumerate(trained.models)
        for name, parameter in model.named_parameters()
    }


def _named(optimizer: Any, names: dict[int, str]) -> Any:
    """Return the state of an optimizer; of one of torch, by the names of its parameters."""
    content = optimizer.state_dict()
    if not isinstance(optimizer, torch.optim.Optimizer):
        return content
    parameters = enumerate(parameters_of(optimizer))
    state = {names.get(id(each), str(number)): optimizer.state.get(each) for number, each in parameters}
    return {"state": state, "groups": content["param_groups"]}
