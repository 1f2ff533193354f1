"""Meetings: the calls that every rank of a gang makes, in the same order.

A loop that makes such a call on one rank only would hang in a collective without naming the cause. So before each of
them all ranks send rank 0 what they are about to do. If that differs, every rank raises an error that names the ranks
and their calls. Messages are used, not collectives, because a rank that is elsewhere may be in a collective of the
training.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from hpc_det.distributed.gang_messages import GangMessages, RankGone
from hpc_det.errors import HpcDetError, UsageError, count

LONGEST_S = 24 * 3600.0
"""Seconds that ranks wait for the last one; one rank may do long work alone, such as an evaluation."""
NOTE_S = 20.0
"""Seconds after which a waiting rank prints for whom it waits."""
FAILED_S = 20.0
"""Seconds that a rank which has failed waits for the others, one of which may be in a collective with this rank."""
_CALL, _VERDICT = "core call", "core verdict"


class Meetings:
    """One rank's part in the meetings. `ticks` returns how often this rank has asked whether to stop."""

    def __init__(self, messages: GangMessages, ticks: Callable[[], int]) -> None:
        self._messages = messages
        self._ticks = ticks
        self._number = 0

    def meet(self, call: str, *, failed: bool = False) -> None:
        """Wait until every rank makes its next call, and raise UsageError if the calls differ.

        `failed`: this rank cannot take part, because an exception is under way; the other ranks then raise HpcDetError.
        It waits for them for FAILED_S seconds.
        """
        if self._messages.size == 1:
            return
        self._number += 1
        number = self._number
        try:
            problem, is_usage = self._met(number, call, failed)
        except RankGone:
            if failed:  # the rank's error is raised instead
                return
            raise
        if problem and not failed:
            raise (UsageError if is_usage else HpcDetError)(problem)

    def _met(self, number: int, call: str, failed: bool) -> tuple[str, bool]:
        """Exchange the calls, and return the problem and whether the user's program causes it."""
        limit_s = FAILED_S if failed else LONGEST_S
        self._messages.to_rank_0(_CALL, [number, call, self._ticks(), failed])
        if self._messages.rank == 0:
            self._messages.to_all(_VERDICT, [number, *self._verdict(number, call, limit_s)])
        _, problem, is_usage = self._messages.from_rank_0(
            _VERDICT,
            f"answered {call}",
            limit_s=limit_s,
            is_it=lambda value: value[0] == number,
            go_on=_Note(self._messages, number, call),
        )
        return problem, is_usage

    def _verdict(self, number: int, call: str, limit_s: float) -> tuple[str, bool]:
        """Return the problem of this meeting, "" without one, and whether the user's program causes it."""
        calls = self._messages.from_all(
            _CALL,
            f"made the call {call}",
            limit_s=limit_s,
            is_it=lambda value: value[0] == number,
            go_on=_Note(self._messages, number, call),
        )
        if failed := [rank for rank, (_, _, _, has_failed) in enumerate(calls) if has_failed]:
            return f"{call}: rank {failed[0]} failed, so nothing was committed", False
        for what, place in (("calls", 1), ("ticks", 2)):
            values = [value[place] for value in calls]
            if other := next((rank for rank, value in enumerate(values) if value != values[0]), None):
                return _different(what, call, other, values), True
        return "", False


class _Note:
    """Prints once for whom a meeting waits, if that takes longer than NOTE_S; rank 0 knows which ranks are missing."""

    def __init__(self, messages: GangMessages, number: int, call: str) -> None:
        self._messages, self._number, self._call = messages, number, call
        self._at = time.monotonic() + NOTE_S

    def __call__(self) -> None:
        if time.monotonic() < self._at:
            return
        self._at = float("inf")
        missing = "another rank"
        if self._messages.rank == 0:
            here = self._messages.latest(_CALL)
            ranks = [rank for rank in range(self._messages.size) if here.get(rank, [0])[0] != self._number]
            missing = f"rank {', '.join(map(str, ranks[:8]))}"
        print(
            f"hpc-det: rank {self._messages.rank} has waited {NOTE_S:g} s in {self._call} for {missing}; every rank "
            f"must make this call",
            file=sys.stderr,
            flush=True,
        )


def _different(what: str, call: str, other: int, values: list[Any]) -> str:
    if what == "calls":
        return (
            f"ranks make different calls: rank 0 {values[0]}, rank {other} {values[other]}; call the methods of "
            f"hpc_det.core on every rank, in the same order and with the same step"
        )
    return (
        f"{call}: rank 0 has called should_stop {count(values[0], 'time')}, rank {other} "
        f"{count(values[other], 'time')}; call it on every rank, equally often"
    )
