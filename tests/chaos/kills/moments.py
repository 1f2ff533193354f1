"""Change functions of the product, in each process of a job, so that they carry an order out at its moment.

`inject/sitecustomize.py` installs this where its folder is on PYTHONPATH. Modules are changed when they are imported.
Only the first pending order is considered, so that orders are carried out one after the other.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.chaos.kills import orders
from tests.chaos.kills.victims import Processes
from tests.processes import send

_NEVER_S = 90.0
"""Longest wait [s] of a process for its victims, or for its own end. Shorter than a test's wait, so that the log shows
the cause.
"""


def install(folder: Path) -> None:
    found = orders.of(folder)
    by_module: dict[str, list[int]] = {}
    for number, order in enumerate(found):
        by_module.setdefault(order.moment.function.partition(":")[0], []).append(number)
    moments = _Moments(folder, found)
    for name, numbers in by_module.items():
        if name in sys.modules:
            moments.change(sys.modules[name], numbers)
    sys.meta_path.insert(0, _Finder(moments, by_module))


def owner_of(function: str, module: ModuleType) -> tuple[Any, str]:
    """Return the object that has a moment's function as an attribute, and the attribute's name."""
    *path, name = function.partition(":")[2].split(".")
    return functools.reduce(getattr, path, module), name


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, moments: _Moments, by_module: dict[str, list[int]]) -> None:
        self._moments, self._by_module = moments, by_module

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        numbers = self._by_module.pop(name, None)
        spec = importlib.util.find_spec(name) if numbers else None
        if spec is None or spec.loader is None:
            return None
        executes = spec.loader.exec_module

        def execute(module: ModuleType) -> None:
            executes(module)
            self._moments.change(module, numbers or [])

        spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec


class _Moments:
    def __init__(self, folder: Path, found: Sequence[orders.Order]) -> None:
        self._folder, self._orders = folder, found
        self._lock = threading.Lock()

    def change(self, module: ModuleType, numbers: Sequence[int]) -> None:
        for function in {self._orders[number].moment.function for number in numbers}:
            owner, name = owner_of(function, module)
            of_it = [number for number in numbers if self._orders[number].moment.function == function]
            setattr(owner, name, self._around(owner.__dict__[name], of_it))

    def _around(self, function: Any, numbers: Sequence[int]) -> Any:
        if isinstance(function, (classmethod, staticmethod)):
            return type(function)(self._around(function.__func__, numbers))
        calls = [0]

        @functools.wraps(function)
        def around(*arguments: Any, **named: Any) -> Any:
            with self._lock:
                calls[0] += 1
                count = calls[0]
            self._look(numbers, count, after=False)
            answer = function(*arguments, **named)
            self._look(numbers, count, after=True)
            return answer

        return around

    def _look(self, numbers: Sequence[int], count: int, *, after: bool) -> None:
        for number in numbers:
            moment = self._orders[number].moment
            is_here = moment.rank is None or os.environ.get("RANK") == str(moment.rank)
            if is_here and moment.after == after and count >= moment.count and self._is_next(number):
                _carry_out(self._folder, number, self._orders[number])
                return

    def _is_next(self, number: int) -> bool:
        done = orders.done(self._folder)
        if len(done) < number:
            return False
        waits = number and not self._orders[number].at_once
        if waits and _attempt(_trial(self._folder)) <= done[number - 1]["attempt"]:
            return False
        return orders.claim(self._folder, number)


def _carry_out(folder: Path, number: int, order: orders.Order) -> None:
    trial, own = _trial(folder), os.getpid()
    victims = _victims(folder, trial, order.victims)
    assert victims, f"{order.victims}: there are none"
    others = [pid for pid in victims if pid != own]
    committed = [path.name for path in trial.glob("checkpoints/*") if not path.name.startswith(".")]
    if order.stops_first:
        send(others, signal.SIGSTOP)
    orders.note_done(folder, number, killed=victims, committed=committed, attempt=_attempt(trial))
    send(others, order.signal)
    if own in victims:
        os.kill(own, order.signal)
    if order.stays or (own in victims and order.signal == signal.SIGKILL):
        time.sleep(_NEVER_S)


def _victims(folder: Path, trial: Path, kinds: Sequence[str]) -> list[int]:
    """Return the PIDs of the victims. At a start some may not exist yet, and this waits for them."""
    end = time.monotonic() + _NEVER_S
    while time.monotonic() < end:
        processes = Processes(folder, trial)
        found = [processes.victims(kind) for kind in kinds]
        if all(found):
            return list(dict.fromkeys(pid for pids in found for pid in pids))
        time.sleep(0.01)
    return []


def _trial(folder: Path) -> Path:
    return Path((folder / "trial").read_text())


def _attempt(trial: Path) -> int:
    """Return the number of the last attempt that has started."""
    journal = trial / "journal.jsonl"
    return journal.read_text().count('"event": "started"') if journal.exists() else 0
