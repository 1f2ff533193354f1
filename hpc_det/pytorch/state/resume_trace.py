"""What `hpc-det experiment verify-resume` compares: a line for each batch, written by each rank.

{"batch": 7, "attempt": 2, "first": true,      the first batch of its attempt: a resume, where the batch is not 0
 "state": {"model 0: fc.bias": "float32 (10,) 5d0f...", "attribute trial.ema": "0.25", ...},    before the batch
 "data": {"[0]": "float32 (32, 4) 81aa...", ...},        what the trial got
 "metrics": {"['loss']": "float32 0.693..."}}            what the trial returned
The last line has the state at the end of the training alone.

Nothing of this runs in other trainings: methods of the strategy and of the trial are replaced where it does.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

from hpc_det.distributed.forced_stop import ForcedStop
from hpc_det.node.files import make_folder
from hpc_det.node.json_files import append_line
from hpc_det.pytorch.state.fingerprint import Texts, texts_of
from hpc_det.pytorch.state.resume_state import RankState
from hpc_det.pytorch.strategies.strategy import Strategy
from hpc_det.pytorch.trial.trial import Trial
from hpc_det.pytorch.trial.trial_context import TrialContext
from hpc_det.store.attempt import request_stop
from hpc_det.store.folders import TrialFolder


class ResumeTrace:
    def __init__(
        self,
        trial: Trial,
        context: TrialContext,
        strategy: Strategy,
        stop: ForcedStop,
        stops: frozenset[int],
        folder: TrialFolder,
        attempt: int,
    ) -> None:
        """Before the loop is made. `stops`: so many batches are trained when the training is stopped."""
        self._state = RankState(trial, context, strategy, folder.experiment().code)
        self._is_chief = context.distributed.is_chief
        self._stop, self._stops = stop, stops
        self._folder, self._attempt = folder, attempt
        self._file = folder.resume_trace(context.distributed.rank)
        self._is_first = True
        self._data: Texts = {}
        self._drawn = 0
        make_folder(self._file.parent)
        self._replace(strategy, "begin", self._begin)
        self._replace(strategy, "train_batch", self._train_batch)
        self._replace(strategy, "end_batch", self._end_batch)
        for what in ("callbacks", "training_data_loader", "validation_data_loader"):
            self._replace(trial, f"build_{what}", self._noted(what))

    def end(self, kind: str, steps: int) -> None:
        """The loop has ended with `kind`, see `hpc_det.pytorch.loop.loop.Loop.end`."""
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
        """A batch of training may be several of the loader's."""
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
