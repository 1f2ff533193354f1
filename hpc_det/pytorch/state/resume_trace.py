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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hpc_det.core.fingerprint import Texts, attributes, is_users, some_texts_of, texts_of
from hpc_det.core.state_texts import generators_texts, gradients_texts, names_of, optimizer_state, weights_texts
from hpc_det.core.trace_file import TraceFile, UsersCode
from hpc_det.distributed.preempt import ForcedStop
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
        self._file = TraceFile(folder, built.context.distributed.rank, attempt)
        self._data: Texts = {}
        self._drawn = 0
        self._replace(built.strategy, "begin", self._begin)
        self._replace(built.strategy, "train_batch", self._train_batch)
        self._batch_ends = built.strategy.batch_ends
        for what in ("callbacks", "training_data_loader", "validation_data_loader"):
            self._replace(built.trial, f"build_{what}", self._noted(what))

    def end(self, kind: str, steps: int) -> None:
        """Record that the loop has ended with `kind`, see `hpc_det.pytorch.loop.loop.Loop.end`."""
        if kind == "finished":
            self._file.write(steps, state=self._state.texts())
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
        begun = original(data, batches and self._seen(batches), progress)
        self._batch_ends.append(self._end_batch)
        return begun

    def _seen(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches, recording their data. A training batch may consist of several batches of the loader."""
        for batch in batches:
            self._drawn += 1
            self._data |= texts_of(f"batch {self._drawn}: " * (self._drawn > 1), batch)
            yield batch

    def _train_batch(self, original: Any, batches: Any, epoch: int, number: int) -> Any:
        state, self._data, self._drawn = self._state.texts(), {}, 0
        metrics = original(batches, epoch, number)
        self._file.write(number, state=state, data=self._data, metrics=texts_of("", metrics))
        return metrics

    def _end_batch(self, number: int) -> None:
        if number + 1 in self._stops:
            self._stop.force()


class RankState:
    """The values on one rank that must be the same after a resume as without it."""

    def __init__(self, built: BuiltTrial, code: Path) -> None:
        """`code`: the folder of the user's modules."""
        self._trial, self._context, self._strategy = built.trial, built.context, built.strategy
        self._code = UsersCode(code, type(built.trial).__module__)
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
        for module in self._code.modules():
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


def _saved(trained: Trained) -> Texts:
    """Return the values that checkpoints contain."""
    found = generators_texts()
    names = names_of(trained.models)
    for number, model in enumerate(trained.models):
        found |= weights_texts(f"model {number}", model, trained.replaced) | gradients_texts(f"model {number}", model)
    for number, optimizer in enumerate(trained.optimizers):
        found |= texts_of(f"optimizer {number}", optimizer_state(optimizer, names))
    if trained.scaler:
        found |= texts_of("gradient scaler", trained.scaler.state_dict())
    for number, scheduler in enumerate(trained.schedulers):
        found |= texts_of(f"learning rate schedule {number}", scheduler.state_dict())
    return found
