"""The rungs of a search by successive halving: who reached each, with what value, and who went on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hpc_det.search.adaptive import AdaptiveSearch
from hpc_det.search.asha import AsyncHalving
from hpc_det.search.method import Exit
from hpc_det.search.state import Entry, SearchState

Record = dict[str, Any]


def brackets_of(search: SearchState, told: Sequence[Entry]) -> list[Record]:
    """{"rungs": [{"length", "trials": [{"trial", "value", "fate"}]}]} of each bracket; none of other searches.

    `told`: the reports of the trials, oldest first. A fate is promoted, finished, waiting or stopped. Trials whose
    hyperparameters are invalid were never there.
    """
    values = {(entry["trial"], entry["until"]): entry["value"] for entry in told if entry["event"] == "reported"}
    return [{"rungs": list(_rungs(halving, numbers, search, values))} for halving, numbers in _brackets(search)]


def _brackets(search: SearchState) -> Iterator[tuple[AsyncHalving, Sequence[int]]]:
    """Each with the numbers of its trials in the whole search."""
    if isinstance(search.method, AsyncHalving):
        yield search.method, sorted(search.trials)
    elif isinstance(search.method, AdaptiveSearch):
        yield from ((bracket.search, bracket.numbers) for bracket in search.method.brackets)


def _rungs(
    halving: AsyncHalving, numbers: Sequence[int], search: SearchState, values: dict[tuple[int, int], float | None]
) -> Iterator[Record]:
    lengths = halving.lengths
    for index, length in enumerate(lengths):
        trials = []
        for own, number in enumerate(numbers, 1):
            if (number, length) in values and search.trials[number].ended is not Exit.INVALID_HP:
                fate = _fate(halving, own, index, is_last=index + 1 == len(lengths))
                trials.append({"trial": number, "value": values[number, length], "fate": fate})
        yield {"length": length, "trials": trials}


def _fate(halving: AsyncHalving, own: int, rung: int, *, is_last: bool) -> str:
    if halving.rung_of(own) > rung:
        return "promoted"
    if is_last:
        return "finished"
    return "stopped" if halving.is_closed(own) else "waiting"
