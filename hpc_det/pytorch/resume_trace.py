"""What `hpc-det experiment verify-resume` compares: a line for each batch, written by each rank.

{"batch": 7, "attempt": 2, "first": true,      the first batch of its attempt: a resume, where the batch is not 0
 "state": {"weights of model 0: fc.bias": "float32 (10,) 5d0f...", "attribute trial.ema": "0.25", ...},    before it
 "data": {"[0]": "float32 (32, 4) 81aa...", ...},        what the trial got
 "metrics": {"['loss']": "float32 0.693..."}}            what the trial returned
The last line has the state at the end of the training alone.

Nothing of this runs in other trainings: methods of the strategy and of the trial are replaced where it does.
"""

from __future__ import annotations

import math
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from hpc_det.core.preempt import StopAgreement
from hpc_det.core.rng import rng_state
from hpc_det.pytorch.fingerprint import Texts, attributes, tensor_text, texts_of
from hpc_det.pytorch.strategy import Strategy
from hpc_det.pytorch.trial import Trial
from hpc_det.pytorch.trial_context import TrialContext, parameters_of
from hpc_det.store.files import append_line
from hpc_det.store.folders import TrialFolder
from hpc_det.store.modes import make_folder
from hpc_det.store.stop import request_stop


class ForcedStops(StopAgreement):
    """Stops that all ranks know beforehand, so that nothing needs to be agreed on."""

    _forced_at = math.inf

    def force(self) -> None:
        """Every rank calls this between the same two ticks: the next one stops."""
        self._forced_at = self._tick + 1

    @property
    def is_forced(self) -> bool:
        return self._tick >= self._forced_at

    @property
    def stopped(self) -> bool:
        return self.is_forced or super().stopped

    def should_stop(self) -> bool:
        return super().should_stop() or self.is_forced


class ResumeTrace:
    def __init__(
        self,
        trial: Trial,
        context: TrialContext,
        strategy: Strategy,
        stop: ForcedStops,
        stops: frozenset[int],
        folder: TrialFolder,
        attempt: int,
    ) -> None:
        """Before the loop is made. `stops`: so many batches are trained when the training is stopped."""
        self._trial, self._context, self._strategy = trial, context, strategy
        self._stop, self._stops = stop, stops
        self._folder, self._attempt = folder, attempt
        self._file = folder.resume_trace(context.distributed.rank)
        self._is_first = True
        self._data: Texts = {}
        self._drawn = 0
        self._others: dict[str, Any] = {}
        """What the trial has built for the loop, by name."""
        make_folder(self._file.parent)
        self._replace(strategy, "begin", self._begin)
        self._replace(strategy, "train_batch", self._train_batch)
        self._replace(strategy, "end_batch", self._end_batch)
        for what in ("callbacks", "training_data_loader", "validation_data_loader"):
            self._replace(trial, f"build_{what}", self._noted(what))

    def end(self, kind: str, steps: int) -> None:
        """The loop has ended with `kind`, see `hpc_det.pytorch.loop.Loop.end`."""
        if kind == "finished":
            self._write(steps, state=self._state())
        elif self._stop.is_forced and self._context.distributed.is_chief:
            source = f"verify-resume on {socket.gethostname()}"
            request_stop(self._folder.stop, attempt=self._attempt, reason="resume check", source=source)

    def _replace(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        setattr(owner, name, lambda *arguments: around(original, *arguments))

    def _noted(self, what: str) -> Callable[..., Any]:
        def build(original: Callable[[], Any]) -> Any:
            self._others[what] = built = original()
            return built

        return build

    def _begin(self, original: Any, data: Any, batches: Iterator[Any] | None, progress: Any) -> Any:
        return original(data, batches and self._seen(batches), progress)

    def _seen(self, batches: Iterator[Any]) -> Iterator[Any]:
        """A batch of training may be several of the loader's."""
        for batch in batches:
            self._drawn += 1
            self._data |= texts_of(f"batch {self._drawn}: " * (self._drawn > 1), batch)
            yield batch

    def _train_batch(self, original: Any, batches: Any, epoch: int, number: int) -> Any:
        state, self._data, self._drawn = self._state(), {}, 0
        metrics, records = original(batches, epoch, number)
        self._write(number, state=state, data=self._data, metrics=texts_of("", metrics))
        return metrics, records

    def _end_batch(self, original: Any, number: int) -> None:
        original(number)
        if number + 1 in self._stops:
            self._stop.force()

    def _write(self, batch: int, **parts: Texts) -> None:
        append_line(
            self._file, {"batch": batch, "attempt": self._attempt, "first": self._is_first, **parts}, durable=False
        )
        self._is_first = False

    # --- what this rank has

    def _state(self) -> Texts:
        trained = self._strategy.trained()
        names = _names(trained.models)
        found = texts_of("generators", rng_state())
        for number, model in enumerate(trained.models):
            found |= _weights(f"model {number}", model, trained.replaced)
        for number, optimizer in enumerate(trained.optimizers):
            found |= texts_of(f"optimizer {number}", _named(optimizer, names))
        for number, scheduler in enumerate(trained.schedulers):
            found |= texts_of(f"learning rate schedule {number}", scheduler.state_dict())
        return found | self._attributes(trained.models)

    def _attributes(self, models: Sequence[torch.nn.Module]) -> Texts:
        """What no checkpoint has unless the trial sees to it: Python attributes and global variables."""
        owned = frozenset(id(each) for each in self._strategy.owned())
        found: Texts = {}
        for path, value in self._owners_of_attributes(models):
            for name, part in attributes(value):
                found |= texts_of(f"attribute {path}{name}", part, owned)
        module = sys.modules[type(self._trial).__module__]
        for name, value in list(vars(module).items()):
            if not name.startswith("__"):
                found |= texts_of(f"global variable {module.__name__}.{name}", value, owned)
        return found

    def _owners_of_attributes(self, models: Sequence[torch.nn.Module]) -> Iterator[tuple[str, object]]:
        yield "trial", self._trial
        for number, model in enumerate(models):
            for name, module in model.named_modules():
                if not type(module).__module__.startswith(("torch.", "deepspeed.", "hpc_det.")):
                    yield f"model {number}{'.' * bool(name)}{name}", module
        for name, callback in (self._others.get("callbacks") or {}).items():
            yield f"callbacks[{name!r}]", callback
        for what in ("training", "validation"):
            loader = self._others.get(f"{what}_data_loader")
            for part in ("dataset", "sampler", "batch_sampler", "generator", "collate_fn"):
                yield f"{what} data loader.{part}", getattr(loader, part, None)


def _weights(path: str, model: torch.nn.Module, replaced: frozenset[int]) -> Texts:
    """Buffers that are in no state_dict, too, and gradients that wait for a step. `replaced`: see Trained."""
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if id(buffer) not in replaced]
    tensors = [*model.named_parameters(), *buffers]
    waiting = [(name, parameter.grad) for name, parameter in model.named_parameters() if parameter.grad is not None]
    found = {f"{path}: {name}": tensor_text(tensor) for name, tensor in tensors}
    return found | {f"gradient of {path}: {name}": tensor_text(gradient) for name, gradient in waiting}


def _names(models: Sequence[torch.nn.Module]) -> dict[int, str]:
    """Of parameters, by their ids."""
    return {
        id(parameter): f"{number}.{name}" if number else name
        for number, model in enumerate(models)
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
