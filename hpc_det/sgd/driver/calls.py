"""Calls to all ranks, the reduction of their results, and rounds of calls.

A round is one iteration over TorchTrainer.remaining(). A restarted program repeats the round in which the earlier one
ended. Each call that changes the state ends with a snapshot, which contains a record of the round: the calls
made in it, and their results. The restarted program makes the same calls: recorded calls return the recorded results,
later calls are sent to the ranks.

RUN/round      "TOKEN CALLS" of the last completed round. Snapshots do not record that a round is complete, because the
               last one of a round is taken before its end. The file has no seal: a forged one can only change whether a
               round is repeated.
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
"""Approximate limit of a record in bytes: it is sent with each snapshot in the head of a message, which is limited
(hpc_det.node.frames.LONGEST_HEAD)."""

_COMPARED = ("num_steps", "profile")
"""Arguments that, besides the method, identify a call: a call with other values is not the recorded one."""

_RESTARTS = ("train", "load_state_dict")
"""Methods that discard the record of a round that was not completed, if they are called outside of a round: they change
the state from which that round would continue.
"""


class Call(NamedTuple):
    """A call of a Runner method on all ranks."""

    method: str
    """Name of the Runner's method."""
    arguments: Mapping[str, Any]
    """Its keyword arguments."""
    then: Callable[[list[Any]], Any] = list
    """Makes the result for the program from the ranks' results in rank order."""

    @property
    def name(self) -> str:
        """A text by which a restarted program recognizes the same call."""
        compared = [f"{name}={self.arguments[name]}" for name in _COMPARED if name in self.arguments]
        return f"{self.method}({', '.join(compared)}) -> {self.then.__name__}"


def reduce(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one result from those of all ranks, with the keys of rank 0's.

    `num_samples` is summed; other numbers are averaged; any other value is rank 0's. The mean, a numpy.float64, is
    unweighted over the ranks that have the key and a value other than NaN; so it is not the mean over all samples.
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
    """A call that the state contains."""

    name: str
    """Call.name."""
    epochs_done: int
    """Completed passes over the training data after the call."""
    result: str
    """The pickled result in base 85."""


class Rounds:
    """The current round, its record, and the replay of a record after a restart."""

    def __init__(self, ended: Path, *, is_durable: bool) -> None:
        """`ended`: path of RUN/round; `is_durable`: whether a later program may continue this run."""
        self._is_durable = is_durable
        self._ended = ended
        self._token = ""
        self._calls: list[_Recorded] = []
        self._epoch = self._made = 0
        """Number of the round's epoch; how many calls of the round this program has made."""
        # open: the program is in the round; recorded: its calls are recorded; left: an earlier program did not end it
        self._is_open = self._is_recorded = self._is_left = False

    # --- called by the program

    def next_epoch(self, epochs_done: int) -> int:
        """Return the epoch of the round that an earlier program did not complete, or of a new round."""
        return self._epoch if self._is_left else epochs_done

    @contextmanager
    def opened(self, epoch: int) -> Iterator[None]:
        """Open the round while the program is in the `with` block. A round left by `break` or an exception is not
        completed."""
        if not self._is_left:
            self._token, self._epoch, self._calls = secrets.token_hex(8), epoch, []
        self._made, self._is_open, self._is_recorded, self._is_left = 0, True, True, False
        try:
            yield
        except GeneratorExit:  # the loop over remaining() was left
            self._is_open = False
            raise
        self._end()

    def once(self, call: Call, make: Callable[[], Any]) -> Any:
        """Return the recorded result of this call, or the result of `make()` if none is recorded.

        If another call is recorded in its place, or the result cannot be unpickled, a warning is logged, and this and
        all later calls of the round are made.
        """
        if not self._is_replaying:
            return make()
        recorded = self._calls[self._made]
        try:
            if recorded.name != call.name:
                raise LookupError(f"the program now calls {call.name}, and the recorded call is {recorded.name}")
            # The snapshot that contains the record is sealed with the run's key, so unpickling is safe.
            result = pickle.loads(base64.b85decode(recorded.result))
        except Exception as error:
            _log.warning(
                "epoch %d is repeated, but %s: from here on all calls are made, on a state that already contains %d "
                "calls of this epoch",
                self._epoch,
                error,
                len(self._calls),
            )
            del self._calls[self._made :]
            return make()
        self._made += 1
        return result

    def epochs_done(self, of_state: int) -> int:
        """Return the completed passes over the training data after the calls that this program has made.

        `of_state`: the completed passes that the state contains; during a replay the state is ahead of the program.
        """
        if not self._is_replaying:
            return of_state
        return self._calls[self._made - 1].epochs_done if self._made else self._epoch

    # --- called when the state changes

    def add(self, call: Call, result: Any, epochs_done: int) -> None:
        """Add a call, which the state contains now, to the record; do nothing outside of a recorded round.

        If its result is too large or cannot be pickled, a warning is logged and the round is not recorded any more.
        """
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
        except Exception as error:  # pickle raises exceptions of many types
            problem = f"the result of {call.name} cannot be pickled: {error}"
        self._made = len(self._calls)
        if problem:
            _log.warning(
                "a restarted program will not repeat epoch %d, but start the next one: %s", self._epoch, problem
            )
            self.forget()

    def forget(self) -> None:
        """Discard the record; nothing is recorded until the next round."""
        self._calls, self._made, self._is_recorded, self._is_left = [], 0, False, False

    def record(self) -> dict[str, Any]:
        """Return the record for a snapshot; empty if no call is recorded."""
        return {"token": self._token, "epoch": self._epoch, "calls": [*self._calls]} if self._calls else {}

    def resume(self, record: Mapping[str, Any]) -> None:
        """Continue with the record in the snapshot that this program starts from."""
        if not record:
            return
        self._token, self._epoch = record["token"], record["epoch"]
        self._calls = [_Recorded(*call) for call in record["calls"]]
        try:
            self._is_left = self._ended.read_text() != self._mark
        except (OSError, ValueError):  # no round was completed, or the file is damaged: repeat the round
            self._is_left = True
        if not self._is_left:
            self.forget()

    @property
    def _is_replaying(self) -> bool:
        """True if the next call is a recorded one."""
        return self._is_open and self._made < len(self._calls)

    @property
    def _bytes(self) -> int:
        """The approximate size of the record in bytes."""
        return sum(len(call.name) + len(call.result) for call in self._calls)

    @property
    def _mark(self) -> str:
        """The content of RUN/round once this round is completed."""
        # It contains the number of calls: if the disk has an older state with fewer of them, the round is repeated.
        return f"{self._token} {len(self._calls)}"

    def _end(self) -> None:
        """Complete the round, and note that in RUN/round."""
        self._is_open = False
        if self._calls and self._is_durable:
            try:
                write_atomic(self._ended, self._mark, private=True)
            except OSError as error:
                _log.warning("%s: %s; a restarted program would repeat epoch %d", self._ended, error, self._epoch)
        self.forget()
