"""Calls on all ranks, their results as one, and rounds of calls.

Rounds are those of TorchTrainer.remaining(): a program that starts again begins the round again in which it had ended.
Each call that changes the state ends with a snapshot, and that holds a record of the round: the calls so far, and their
results. A later program makes the same calls: those of the record return its results, and the others are made.

RUN/round      "TOKEN CALLS" of the round that has ended last, which no snapshot says. It has no seal: all that it can
               change is whether a round is begun again.
"""

from __future__ import annotations

import base64
import logging
import math
import pickle
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import numpy as np

from hpc_det.node.files import write_atomic
from hpc_det.sgd.operator.options import NUM_SAMPLES

_log = logging.getLogger("hpc_det.sgd")

MOST_BYTES = 2**19
"""Of a record, about: it is sent with every snapshot, in the head of a message (hpc_det.node.frames.LONGEST_HEAD)."""

_COMPARED = ("num_steps", "profile")

_RESTARTS = ("train", "load_state_dict")
"""Outside of a round these make another training of it, in which a round that was open has no place."""


class Call(NamedTuple):
    """A method of the Runner on all ranks; `then` makes what the program gets of their results."""

    method: str
    arguments: Mapping[str, Any]
    then: Callable[[list[Any]], Any] = list

    @property
    def name(self) -> str:
        """The same in a later program, if that calls the same."""
        compared = [f"{name}={self.arguments[name]}" for name in _COMPARED if name in self.arguments]
        return f"{self.method}({', '.join(compared)}) -> {self.then.__name__}"


def reduce(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rank 0's keys: `num_samples` summed, other numbers averaged, anything else rank 0's.

    The mean over ranks is unweighted, and leaves out NaN and ranks without that key: the mean of the ranks' means, not
    of all samples. It is a numpy.float64.
    """
    return {name: _reduced(name, value, results) for name, value in results[0].items()}


def _reduced(name: str, first: Any, results: Sequence[Mapping[str, Any]]) -> Any:
    if not isinstance(first, Real):
        return first
    numbers = [value for result in results if isinstance(value := result.get(name), Real)]
    return sum(numbers) if name == NUM_SAMPLES else _mean(numbers)


def _mean(numbers: Sequence[Any]) -> np.float64:
    known = [float(number) for number in numbers if not math.isnan(number)]
    return np.float64(math.fsum(known) / len(known) if known else math.nan)


class _Recorded(NamedTuple):
    name: str
    epochs_done: int
    """After the call."""
    result: str
    """A pickle, in base 85."""


class Rounds:
    def __init__(self, ended: Path, *, is_durable: bool) -> None:
        """`ended`: the file that names the round that has ended last; `is_durable`: a later program may need it."""
        self._is_durable = is_durable
        self._ended = ended
        self._token = ""
        self._calls: list[_Recorded] = []
        self._epoch = self._made = 0
        """The number that the program was given, and how many of the calls this program has made."""
        self._is_open = self._is_recorded = self._is_left = False

    # --- what the program does

    def next_epoch(self, epochs_done: int) -> int:
        """Of the round that an earlier program has left, or else of a new one."""
        return self._epoch if self._is_left else epochs_done

    @contextmanager
    def opened(self, epoch: int) -> Iterator[None]:
        """While the program is in that round. One that is left by `break` or an exception has not ended."""
        if not self._is_left:
            self._token, self._epoch, self._calls = secrets.token_hex(8), epoch, []
        self._made, self._is_open, self._is_recorded, self._is_left = 0, True, True, False
        try:
            yield
        except GeneratorExit:
            self._is_open = False
            raise
        self._end()

    def once(self, call: Call, make: Callable[[], Any]) -> Any:
        """The result that is recorded for this call; without one what `make` returns."""
        if not self._is_replaying:
            return make()
        recorded = self._calls[self._made]
        try:
            if recorded.name != call.name:
                raise LookupError(f"{call.name} is called now where it was {recorded.name}")
            result = pickle.loads(base64.b85decode(recorded.result))
        except Exception as error:
            _log.warning(
                "epoch %d is begun again, and %s: from here on all calls are made, on a state that contains %d calls "
                "of this epoch already",
                self._epoch,
                error,
                len(self._calls),
            )
            del self._calls[self._made :]
            return make()
        self._made += 1
        return result

    def epochs_done(self, of_state: int) -> int:
        """After the calls that this program has made."""
        if not self._is_replaying:
            return of_state
        return self._calls[self._made - 1].epochs_done if self._made else self._epoch

    # --- what becomes of the state

    def add(self, call: Call, result: Any, epochs_done: int) -> None:
        """The call is in the state from now on."""
        if not self._is_open:
            if call.method in _RESTARTS:
                self.forget()
            return
        if not self._is_recorded:
            return
        try:
            pickled = base64.b85encode(cloudpickle.dumps(result)).decode()
            self._calls.append(_Recorded(call.name, epochs_done, pickled))
            problem = "" if self._bytes <= MOST_BYTES else f"its results have more than {MOST_BYTES} bytes"
        except Exception as error:
            problem = f"the result of {call.name} cannot be pickled: {error}"
        self._made = len(self._calls)
        if problem:
            _log.warning("a program that starts again will not begin epoch %d again: %s", self._epoch, problem)
            self.forget()

    def forget(self) -> None:
        """The record does not fit the state, until the next round."""
        self._calls, self._made, self._is_recorded, self._is_left = [], 0, False, False

    def record(self) -> dict[str, Any]:
        """For the snapshot of the state; empty without a round."""
        return {"token": self._token, "epoch": self._epoch, "calls": [*self._calls]} if self._calls else {}

    def resume(self, record: Mapping[str, Any]) -> None:
        """With the record of the snapshot that this program goes on from."""
        if not record:
            return
        self._token, self._epoch = record["token"], record["epoch"]
        self._calls = [_Recorded(*call) for call in record["calls"]]
        try:
            self._is_left = self._ended.read_text() != self._mark
        except (OSError, ValueError):
            self._is_left = True
        if not self._is_left:
            self.forget()

    @property
    def _is_replaying(self) -> bool:
        return self._is_open and self._made < len(self._calls)

    @property
    def _bytes(self) -> int:
        return sum(len(call.name) + len(call.result) for call in self._calls)

    @property
    def _mark(self) -> str:
        """With fewer calls in the state the round has not ended: they are to be made."""
        return f"{self._token} {len(self._calls)}"

    def _end(self) -> None:
        self._is_open = False
        if self._calls and self._is_durable:
            try:
                write_atomic(self._ended, self._mark, private=True)
            except OSError as error:
                _log.warning("%s: %s; a program that starts now begins epoch %d again", self._ended, error, self._epoch)
        self.forget()
