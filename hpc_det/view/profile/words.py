"""A verdict in a sentence, and what a reader has to know of the numbers beside it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from hpc_det.view.formatting import count, duration, percent
from hpc_det.view.profile.conditions import Conditions
from hpc_det.view.profile.measured import Measured, Pauses
from hpc_det.view.profile.timings import CALLBACKS, Spent
from hpc_det.view.profile.verdict import FEWEST_BATCHES, Kind, Verdict, slowest, waited

_WHY = {
    Kind.DATA_LOADER: "{rank} waits for its data loader",
    Kind.COPY: "{rank} copies between host and device",
    Kind.COMMUNICATION: "ranks exchange gradients and metrics, and computing does not hide it",
    Kind.VALIDATION: "training stands still for validations{validations}",
    Kind.CHECKPOINT: "training stands still for checkpoints{saves}",
    Kind.CALLBACKS: "{rank} runs callbacks, the longest of them {callback}",
    Kind.LOOP: "goes into no timing: it is the loop's own, around each batch",
    Kind.SLOW_RANK: "the other ranks wait for {rank}, which takes longer to compute",
    Kind.IDLE_GPUS: "the training code runs, but nothing on the GPUs",
    Kind.WELL_USED: "the ranks compute",
}

NAMED = 8
"""At most so many ranks."""


def why(verdict: Verdict, measured: Measured) -> str:
    """What the verdict stands on."""
    if verdict.share is None:
        return _unknown(measured)
    rank = verdict.rank or slowest(measured.told)
    told = _WHY[verdict.kind].format(
        rank=f"rank {rank.rank} on {rank.host}" if verdict.rank else "a rank",
        callback=_longest_callback(rank),
        validations=_each(measured.validations, "validation"),
        saves=_each(measured.saves, "save"),
    )
    has_more = verdict.rank and verdict.kind is not Kind.SLOW_RANK
    more = f"; the others wait for that {percent(waited(measured.ranks))} of theirs" if has_more else ""
    return f"{percent(verdict.share)} of the time {told}{more}"


def _unknown(measured: Measured) -> str:
    if not measured.ranks:
        return "there are no timings; they are taken while profiling.enabled is true"
    return f"{measured.ranks[0].count} batches were measured; a verdict takes {FEWEST_BATCHES}"


def _each(pauses: Pauses, thing: str) -> str:
    return f", {count(pauses.count, thing)} of {duration(pauses.mean_s)}" if pauses.count else ""


def _longest_callback(rank: Spent) -> str:
    callbacks = {name: amount for name, amount in rank.seconds.items() if name.startswith(CALLBACKS)}
    return max(callbacks, key=callbacks.__getitem__, default="").removeprefix(CALLBACKS)


def notes(measured: Measured, conditions: Conditions) -> list[str]:
    """What makes the numbers less than they seem, and saves that came too late."""
    return [*_postponed(measured), *(_notes(measured, conditions) if measured.timings else [])]


def _postponed(measured: Measured) -> Iterator[str]:
    if postponed := measured.postponed_saves:
        yield (
            f"{postponed} of {measured.saves.count} saves came later than they were due, since the one before was "
            f"still being written: save less often, or to a faster file system"
        )


def _notes(measured: Measured, conditions: Conditions) -> Iterator[str]:
    ranks, slots = measured.ranks, conditions.slots
    if missing := list(islice((rank for rank in range(slots) if rank not in measured.timings), NAMED + 1)):
        names = ", ".join(map(str, missing[:NAMED])) + (" and more" if len(missing) > NAMED else "")
        yield f"timings of {len(ranks)} of {slots} ranks: none of {names}"
    if slots > 1 and any(rank.exposed_s is None for rank in ranks):
        yield (
            "how long ranks wait for gradients is not known here, and is a part of train_batch: compare "
            "optimizations.aggregation_frequency 1 and 1000"
        )
    if measured.gpus() and not conditions.value("profiling.sync_timings", True):
        yield (
            "with profiling.sync_timings: false, timings tell when a GPU was given its work, and not when that was "
            "done: what waits next looks slow"
        )
    if measured.nodes and conditions.shares_nodes:
        yield "system metrics are of whole nodes, and this job had a part of them: others' work is in them"
