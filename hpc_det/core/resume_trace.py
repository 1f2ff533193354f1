"""The trace that `hpc-det experiment verify-resume` compares for a loop on the Core API.

Each rank writes a line for each batch:

  {"batch": 7, "attempt": 2, "first": true, "loop": true,
    "state": {"model: fc.bias": "float32 (10,) 5d0f...", "variable main.total": "0.25", ...},      before the batch
   "variables": ["variable main.total", ...],      the variables that have a value at that time
   "data": {"[0]": "float32 (32, 4) 81aa...", ...},                                         data of the batch
   "metrics": {"training['loss']": "float32 0.693..."}}                what this rank reported during the batch

A loop that does not use `batches` has a line for each step at which it calls `should_stop`, without data and with
"calls": true; "batch" is then the step, and "metrics" were reported since the line before. The last line contains the
tracked objects at the end, and the files that the loop has added to its last checkpoint. Other trainings never import
this module.
"""

from __future__ import annotations

import pickle
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from hpc_det.checkpoint.committed import CODE, LOAD_DATA, MANIFEST, METADATA, Committed
from hpc_det.checkpoint.content import load
from hpc_det.core.external_loader import torch_loader_of
from hpc_det.core.fingerprint import PLAIN, Texts, attributes, is_users, some_texts_of, texts_of
from hpc_det.core.progress import PROGRESS
from hpc_det.core.state_texts import generators_texts, names_of, optimizer_state, weights_texts
from hpc_det.core.trace_file import TraceFile, UsersCode
from hpc_det.core.tracked import TRACKED, Tracked, state_of
from hpc_det.store.trace_names import ATTRIBUTE, GLOBAL, LOADER, VARIABLE

_OURS = re.compile(
    "|".join([*map(re.escape, (TRACKED, PROGRESS, MANIFEST, METADATA, LOAD_DATA, f"{CODE}/"))])
    + r"|(rank|shard)-\d+\.|ranks-\d+-\d+/"
)
"""Beginnings of the names of files that the Core API writes into a checkpoint."""


class LoopTrace:
    """Writes the trace of one rank of a loop."""

    def __init__(self, file: TraceFile, tracked: Tracked, code: UsersCode, resumed: int) -> None:
        """`resumed`: batches in the checkpoint from which this attempt resumes, or 0."""
        self._file = file
        self._tracked = tracked
        self._code = code
        self._resumed = resumed
        self._latest: int | None = None
        """Number of the batch of the last line; None before the first."""
        self._metrics: Texts = {}

    # --- what happens in the loop

    def reported(self, group: str, metrics: Mapping[str, Any]) -> None:
        """Record metrics that this rank reports."""
        self._metrics |= texts_of(group, dict(metrics))

    def before_batch(self, loader: Iterable[Any]) -> dict[str, Any]:
        """Return the state and the variables before the next batch of `loader`."""
        self._metrics = {}
        return self._state(loader)

    def batch(self, number: int, state: dict[str, Any], batch: Texts) -> None:
        """Write the line of a batch that is done. `state`: what `before_batch` returned; `batch`: the data's texts."""
        self._write(number, **state, data=batch, metrics=self._metrics)

    def step(self, number: int) -> None:
        """Write the line of a loop that asks whether to stop after `number` steps, at the first such call only."""
        # the state of a further call at the same step, such as in a validation, has no counterpart after a stop
        if number > max(self._resumed, -1 if self._latest is None else self._latest):
            self._write(number, **self._state(()), metrics=self._metrics, calls=True)
            self._metrics = {}

    def end(self, number: int, newest: Committed | None) -> None:
        """Write the last line. `newest`: the last checkpoint of this attempt, on rank 0."""
        files = _texts_of_files(newest) if newest and newest.steps == number else {}
        self._write(number, state=self._saved() | files)

    def _write(self, number: int, **parts: Any) -> None:
        self._latest = number
        self._file.write(number, loop=True, **parts)

    # --- the state

    def _state(self, loader: Iterable[Any]) -> dict[str, Any]:
        found = self._saved()
        skipped = frozenset(map(id, _parts_of(self._tracked.objects.values())))
        for path, value in (*self._attributes(), *_of_loader(loader)):
            found |= some_texts_of(path, value, skipped)
        variables = {**self._local_variables(), **self._global_variables()}
        for path, value in variables.items():
            found |= some_texts_of(path, value, skipped)
        return {"state": found, "variables": [*variables]}

    def _saved(self) -> Texts:
        """Return the texts of what checkpoints contain."""
        tracked = self._tracked.objects
        models = {name: each for name, each in tracked.items() if isinstance(each, torch.nn.Module)}
        names = names_of(models.values())
        found = generators_texts()
        for name, each in tracked.items():
            if name in models:
                state_of(each)  # reshards the parameters
                found |= weights_texts(
                    name, each
                )  # without gradients, which many loops clear only before they are used
            elif isinstance(each, torch.optim.Optimizer):
                found |= texts_of(name, optimizer_state(each, names))
            else:
                found |= texts_of(name, state_of(each))
        return found

    def _attributes(self) -> Iterator[tuple[str, Any]]:
        """Yield the Python attributes of tracked models, which no checkpoint contains."""
        for name, each in self._tracked.objects.items():
            for place, module in each.named_modules() if isinstance(each, torch.nn.Module) else ():
                if is_users(module):
                    path = f"{ATTRIBUTE}{name}{'.' * bool(place)}{place}"
                    yield from ((f"{path}{part}", value) for part, value in attributes(module))

    def _local_variables(self) -> dict[str, Any]:
        """Return the variables of the user's functions that are running."""
        found: dict[str, Any] = {}
        seen: set[int] = set()
        for frame in reversed([*_frames(self._code)]):
            for name, value in frame.f_locals.items() if frame.f_locals is not frame.f_globals else ():
                is_new = isinstance(value, PLAIN) or id(value) not in seen  # an inner function may have it, too
                if name.isidentifier() and is_new:
                    seen.add(id(value))
                    found.setdefault(f"{VARIABLE}{frame.f_code.co_name}.{name}", value)
        return found

    def _global_variables(self) -> dict[str, Any]:
        modules = self._code.modules()
        return {f"{GLOBAL}{each.__name__}{name}": value for each in modules for name, value in attributes(each)}


def _of_loader(source: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    loader = torch_loader_of(source) or source
    for part in ("dataset", "sampler", "batch_sampler", "collate_fn", "generator"):
        yield f"{ATTRIBUTE}{LOADER}{part}", getattr(loader, part, None)


def _parts_of(tracked: Iterable[Any]) -> Iterator[Any]:
    for each in tracked:
        yield each
        if isinstance(each, torch.nn.Module):
            yield from each.modules()


def _frames(code: UsersCode) -> Iterator[FrameType]:
    """Yield the frames of the user's code that called this, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame:
        if code.contains(frame.f_globals.get("__name__"), frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def _texts_of_files(checkpoint: Committed) -> Texts:
    """Return the tensors and other values in the files that the loop added to a checkpoint, or the files' checksums."""
    found: Texts = {}
    for name, entry in checkpoint.files.items():
        if not _OURS.match(name):
            path = f"file {name}"
            found |= _texts_of_file(path, checkpoint.path / name) or {path: f"{entry.size} bytes, crc32 {entry.crc32}"}
    return found


def _texts_of_file(path: str, file: Path) -> Texts:
    try:
        return texts_of(path, load(file))
    except (
        pickle.UnpicklingError,
        RuntimeError,
        OSError,
        EOFError,
        ValueError,
        KeyError,
    ):  # torch.save did not write it
        return {}
