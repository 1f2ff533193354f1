"""Search methods of users: a class in the trial's code with the methods of hpc_det.search.method.SearchMethod.

An instance is created as Class(max_trials=..., max_length=..., smaller_is_better=..., seed=..., **settings), where
`max_length` is a number or None. The class may have two more methods, each called once per trial, when a worker takes
it:

    sample(trial) -> dict            the trial's hyperparameters; without this method they are drawn from their ranges
    source(trial) -> int | None      the trial with whose latest weights it starts; None, or no method: its own initial
                                     weights

Every process that reads the search's journal has its own instance and makes the same calls. So results may depend only
on these calls: not on the time, on files, or on random numbers, except from a generator that is seeded with `seed`.
"""

from __future__ import annotations

import hashlib
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from hpc_det.errors import UsageError, count
from hpc_det.search.method import Exit, Work

T = TypeVar("T")


class CustomSearch:
    """A search method that calls the user's class, and ends the search at the first error in it.

    Every process meets that error at the same entry of the journal.
    """

    def __init__(self, name: str, code: Path, arguments: Mapping[str, Any]) -> None:
        """Load the user's class and create an instance; an error is not raised, but stored in `problem`.

        `name`: "module:Class"; `code`: the folder with the module; `arguments`: those of the class's constructor.
        """
        self.problem: str | None = None
        """The error that the user has to fix; None if there is none. With an error, the search assigns no more work."""
        self._name = name
        self._file = _file_of(name, code)
        self._created = 0
        try:
            made = load_class(name, code)
        except UsageError as error:
            self.problem, made = f"searcher.class: {error}", None
        self._method: Any = self._guarded("__init__", lambda: made(**arguments) if made else None, None)

    def next_work(self) -> Work | None:
        work: Work | None = self._call("next_work", default=None)
        # Replays rely on trial numbers without gaps, so work of the user's class is checked here.
        if work is None or (isinstance(work, Work) and 1 <= work.trial <= self._created + 1):
            return work
        self.problem = (
            f"searcher.class: {self._name}: next_work returned {work!r} although {count(self._created, 'trial')} "
            "exist; it must return None or a hpc_det.search.method.Work of one of these trials, or of the new trial "
            f"{self._created + 1}"
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

    # With these defaults a search with a problem ends: it has no work, its trials are closed, and it is finished.

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
        """Whether the class chooses hyperparameters or initial weights."""
        # Without these methods, nothing has to be recorded in the journal.
        return hasattr(self._method, "sample") or hasattr(self._method, "source")

    def choose(self, trial: int) -> dict[str, Any]:
        """Return the results of `sample` and `source` as JSON values. Raises UsageError if they fail."""
        chosen: dict[str, Any] = {}
        try:
            if hasattr(self._method, "sample"):
                chosen["hparams"] = dict(self._method.sample(trial))
            if hasattr(self._method, "source"):
                chosen["source"] = self._method.source(trial)
            # The journal contains JSON, so the caller must get the same values as a process that reads the journal.
            return dict(json.loads(json.dumps(chosen, allow_nan=False)))
        except Exception as error:
            raise UsageError(f"searcher.class: {self._name}: {in_words(error, self._file)}") from None

    def _call(self, method: str, *arguments: Any, default: T) -> T:
        return self._guarded(method, lambda: getattr(self._method, method)(*arguments), default)

    def _guarded(self, what: str, call: Callable[[], T], default: T) -> T:
        """Return `call()`; `default` if it raises, which is stored in `problem`, or if there is a problem already."""
        if self.problem is None:
            try:
                return call()
            except Exception as error:
                self.problem = f"searcher.class: {self._name}: {what}: {in_words(error, self._file)}"
        return default


# --- loading a class from the code of a trial, without a folder on sys.path and without writing bytecode
#
# Every process that reads the journal of a search loads the class, including the command line, often for many
# experiments at once. So each file becomes a module with a unique name. The file can import the standard library,
# hpc_det.search and installed packages, but not other files of its folder.


def load_class(name: str, code: Path) -> type[Any]:
    """Return the class `module:Class` from the module's file in the folder `code`.

    Raises UsageError with the error and its line.
    """
    file, class_name = _file_of(name, code), name.partition(":")[2]
    try:
        module = _module(file)
    except OSError as error:
        raise UsageError(
            f"{name}: {file}: {error.strerror}; the class must be in the folder of the trial's code"
        ) from None
    except Exception as error:
        raise UsageError(f"{name}: {in_words(error, file)}") from None
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        raise UsageError(f"{name}: {file} has no class {class_name}")
    return found


def _file_of(name: str, code: Path) -> Path:
    """Return the file that must contain the class `module:Class`."""
    return code.joinpath(*name.partition(":")[0].split(".")).with_suffix(".py")


def in_words(error: Exception, file: Path) -> str:
    """Return the error as text, with the line of `file` that it came from."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    where = f" ({file}, line {lines[-1]})" if lines else f" ({file})"
    return f"{type(error).__name__}: {error}{where}"


def _module(file: Path) -> ModuleType:
    """Return the module of a file, whose name contains a hash of path and content; it is executed once."""
    source = file.read_bytes()
    name = f"hpc_det_user_{hashlib.sha256(bytes(file) + source).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    module = sys.modules[name] = ModuleType(name)  # dataclasses look up their module here
    module.__file__ = str(file)
    try:
        exec(compile(source, str(file), "exec"), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module
