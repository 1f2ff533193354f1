"""A search method of the user's: a class with the methods of hpc_det.search.method.SearchMethod, in the trial's code.

It is made as Class(max_trials=..., max_length=..., smaller_is_better=..., seed=..., **settings), where `max_length` is
a number or None, and it may have two methods more, each asked once for a trial, when a worker takes it:

    sample(trial) -> dict            the trial's hyperparameters; without it they are drawn from their ranges
    source(trial) -> int | None      the trial whose latest weights it begins with; without it, or for None, its own

Every process that reads the search's journal has its own instance and makes the same calls, so what it does may follow
from them alone: no time, no files, no random numbers but of a generator with the `seed`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from hpc_det.errors import UsageError
from hpc_det.search.method import Exit, Work
from hpc_det.search.user_class import in_words, load_class

T = TypeVar("T")


class CustomSearch:
    """The first error in the user's class ends the search, in every process at the same entry of the journal."""

    def __init__(self, name: str, code: Path, arguments: Mapping[str, Any]) -> None:
        """`name`: module:Class. What is wrong with it is told by `problem`."""
        self.problem: str | None = None
        """What the user has to mend. With it the search gives no work any more."""
        self._name = name
        self._file = code.joinpath(*name.partition(":")[0].split(".")).with_suffix(".py")
        self._created = 0
        try:
            made = load_class(name, code)
        except UsageError as error:
            self.problem, made = f"searcher.class: {error}", None
        self._method: Any = self._guarded("__init__", lambda: made(**arguments) if made else None, None)

    def next_work(self) -> Work | None:
        work: Work | None = self._call("next_work", default=None)
        if work is None or (isinstance(work, Work) and 1 <= work.trial <= self._created + 1):
            return work
        self.problem = (
            f"searcher.class: {self._name}: next_work gave {work!r} with {self._created} trials so far; it gives None "
            f"or a hpc_det.search.method.Work, of one of these trials or of number {self._created + 1}, which is new"
        )
        return None

    def start(self, work: Work) -> None:
        self._created = max(self._created, work.trial)
        self._call("start", work, default=None)

    def report(self, trial: int, value: float) -> None:
        self._call("report", trial, value, default=None)

    def end(self, trial: int, how: Exit) -> None:
        self._call("end", trial, how, default=None)

    def give_back(self, trial: int) -> None:
        self._call("give_back", trial, default=None)

    def is_closed(self, trial: int) -> bool:
        return bool(self._call("is_closed", trial, default=True))

    @property
    def finished(self) -> bool:
        return bool(self._guarded("finished", lambda: self._method.finished, True))

    @property
    def progress(self) -> float:
        return min(max(self._guarded("progress", lambda: float(self._method.progress), 1.0), 0.0), 1.0)

    @property
    def trials_expected(self) -> int:
        return self._guarded("trials_expected", lambda: int(self._method.trials_expected), 1)

    @property
    def chooses(self) -> bool:
        """Whether a trial is more than what is drawn for it."""
        return hasattr(self._method, "sample") or hasattr(self._method, "source")

    def choose(self, trial: int) -> dict[str, Any]:
        """What `sample` and `source` say of the trial, as JSON has it. Raises UsageError where they do not."""
        chosen: dict[str, Any] = {}
        try:
            if hasattr(self._method, "sample"):
                chosen["hparams"] = dict(self._method.sample(trial))
            if hasattr(self._method, "source"):
                chosen["source"] = self._method.source(trial)
            return dict(json.loads(json.dumps(chosen, allow_nan=False)))
        except Exception as error:
            raise UsageError(f"searcher.class: {self._name}: {in_words(error, self._file)}") from None

    def _call(self, method: str, *arguments: Any, default: T) -> T:
        return self._guarded(method, lambda: getattr(self._method, method)(*arguments), default)

    def _guarded(self, what: str, call: Callable[[], T], default: T) -> T:
        if self.problem is None:
            try:
                return call()
            except Exception as error:
                self.problem = f"searcher.class: {self._name}: {what}: {in_words(error, self._file)}"
        return default
