"""Limits of a training: one rule for profiled trials and for compared short trainings.

Both give shares of the time that training waits for something. Each noticeable share is a limit; the largest comes
first.

For a profile, the shares are those of one rank. Ranks train in step, so a gang is as fast as its slowest rank. The
other ranks wait for it in the exchange of gradients, so the slowest rank is the one that waits least, and its
communication is the cost of the network.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean

from hpc_det.errors import count
from hpc_det.view.formatting import duration, percent
from hpc_det.view.performance.measured import Conditions, Measured, Pauses
from hpc_det.view.performance.timings import CALLBACKS, Part, Spent

NOTICEABLE = 0.1
"""Smallest share of the time that is a limit; removing a smaller one gains too little."""
IDLE = 0.3
"""Smallest share of the time without work on the GPUs that is a limit. It is larger than NOTICEABLE because the driver
reports GPU use only roughly, and measuring timings itself leaves GPUs idle.
"""
FEWEST_BATCHES = 20
"""Smallest number of measured batches for a verdict; with fewer, the first ones, which are slower, would dominate."""


class Kind(str, enum.Enum):
    """The kinds of verdicts, as text."""

    DATA_LOADER = "data loader bound"
    COPY = "copy bound"
    COMMUNICATION = "communication bound"
    VALIDATION = "validation bound"
    CHECKPOINT = "checkpoint bound"
    CALLBACKS = "callback bound"
    LOOP = "loop bound"
    SLOW_RANK = "slow rank"
    IDLE_GPUS = "idle GPUs"
    WELL_USED = "well used"
    UNKNOWN = "not measured"


_BOUNDS = {
    Part.LOADING: Kind.DATA_LOADER,
    Part.COPYING: Kind.COPY,
    Part.COMMUNICATING: Kind.COMMUNICATION,
    Part.VALIDATING: Kind.VALIDATION,
    Part.SAVING: Kind.CHECKPOINT,
    Part.CALLBACKS: Kind.CALLBACKS,
    Part.REST: Kind.LOOP,
}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A limit of a training, or the absence of one."""

    kind: Kind
    share: float | None = None
    """Share of the time; None if unknown."""
    rank: Spent | None = None
    """The only rank to which the verdict applies, while the others wait for it; None: it applies to all ranks."""


def limits(candidates: Iterable[Verdict], noise: float = 0.0) -> list[Verdict]:
    """Return the verdicts with a noticeable share of the time, largest first.

    `noise`: share by which the throughput varies; smaller shares are not known to be limits.
    """
    found = [verdict for verdict in candidates if (verdict.share or 0) >= max(NOTICEABLE, noise)]
    return sorted(found, key=lambda verdict: -(verdict.share or 0))


# --- of a profile


def verdicts(measured: Measured) -> list[Verdict]:
    """Return the limits of a trial from its measurements, largest first; at least one."""
    ranks = measured.known_ranks
    if not ranks or ranks[0].count < FEWEST_BATCHES:
        return [Verdict(kind=Kind.UNKNOWN)]
    return limits([*_bounds(ranks), *_slow_rank(ranks), *_idle_gpus(measured)]) or [_no_bound(measured)]


def _no_bound(measured: Measured) -> Verdict:
    if not measured.ranks:
        return Verdict(kind=Kind.UNKNOWN)
    return Verdict(kind=Kind.WELL_USED, share=slowest(measured.ranks).share(Part.COMPUTING))


def slowest(ranks: Sequence[Spent]) -> Spent:
    """Return the rank for which the others wait, of at least one."""
    waiting = _waiting(ranks)
    return min(ranks, key=lambda rank: rank.share(waiting))


def _waiting(ranks: Sequence[Spent]) -> Part:
    """Return the part that contains waiting for other ranks; if communication is not measured, it is train_batch."""
    return Part.COMPUTING if any(rank.exposed_s is None for rank in ranks) else Part.COMMUNICATING


def _bounds(ranks: Sequence[Spent]) -> list[Verdict]:
    """Return a verdict for each part of the slowest rank's time, in the order of parts."""
    slow, alone = slowest(ranks), _alone(ranks)
    parts = ((part, kind) for part, kind in _BOUNDS.items() if len(ranks) > 1 or part is not Part.COMMUNICATING)
    return [Verdict(kind=kind, share=slow.share(part), rank=slow if part is alone else None) for part, kind in parts]


def waited(ranks: Sequence[Spent]) -> float:
    """Return the mean share of their time for which the other ranks wait for the slowest one."""
    slow, part = slowest(ranks), _waiting(ranks)
    others = [rank.share(part) for rank in ranks if rank is not slow]
    return fmean(others) - slow.share(part) if others else 0.0


def _alone(ranks: Sequence[Spent]) -> Part | None:
    """Return the part in which the slowest rank takes longer than the others, if they wait for it noticeably."""
    slow = slowest(ranks)
    if waited(ranks) < NOTICEABLE:
        return None
    more = {
        part: slow.share(part) - fmean(rank.share(part) for rank in ranks if rank is not slow)
        for part in Part
        if part is not _waiting(ranks)
    }
    return max(more, key=more.__getitem__)


def _slow_rank(ranks: Sequence[Spent]) -> list[Verdict]:
    """Return a verdict if the slowest rank is slower in a part without a verdict, such as computing."""
    slow, alone = slowest(ranks), _alone(ranks)
    if alone is None or (alone in _BOUNDS and slow.share(alone) >= NOTICEABLE):
        return []
    return [Verdict(kind=Kind.SLOW_RANK, share=waited(ranks), rank=slow)]


def _idle_gpus(measured: Measured) -> list[Verdict]:
    """Return a verdict if the GPUs are idle while the code trains or validates."""
    gpus = measured.gpus()
    if not gpus or not measured.ranks:
        return []
    slow = slowest(measured.ranks)
    busy = fmean(gpu["util"].mean for gpu in gpus) / 100
    idle = slow.share(Part.COMPUTING) + slow.share(Part.VALIDATING) + slow.share(Part.COMMUNICATING) - busy
    return [Verdict(kind=Kind.IDLE_GPUS, share=idle)] if idle >= IDLE else []


# --- in words


_WHY = {
    Kind.DATA_LOADER: "{rank} waits for its data loader",
    Kind.COPY: "{rank} copies between host and device",
    Kind.COMMUNICATION: "ranks exchange gradients and metrics, and computing does not hide it",
    Kind.VALIDATION: "training is blocked for validations{validations}",
    Kind.CHECKPOINT: "training is blocked for checkpoints{saves}",
    Kind.CALLBACKS: "{rank} runs callbacks, the longest of them {callback}",
    Kind.LOOP: "goes into no timing: it is the loop's own, around each batch",
    Kind.SLOW_RANK: "the other ranks wait for {rank}, which takes longer to compute",
    Kind.IDLE_GPUS: "the training code runs, but nothing on the GPUs",
    Kind.WELL_USED: "the ranks compute",
}

NAMED = 8
"""Largest number of ranks named in a text."""


def why(verdict: Verdict, measured: Measured) -> str:
    """Return the measurements behind a verdict as a sentence."""
    if verdict.share is None:
        return _unknown(measured)
    rank = verdict.rank or slowest(measured.known_ranks)
    spent = _WHY[verdict.kind].format(
        rank=f"rank {rank.rank} on {rank.host}" if verdict.rank else "a rank",
        callback=_longest_callback(rank),
        validations=_each(measured.validations, "validation"),
        saves=_each(measured.saves, "save"),
    )
    has_more = verdict.rank and verdict.kind is not Kind.SLOW_RANK
    more = f"; the others wait for it {percent(waited(measured.ranks))} of their time" if has_more else ""
    return f"{percent(verdict.share)} of the time {spent}{more}"


def _unknown(measured: Measured) -> str:
    if not measured.ranks:
        return "no timings exist; set profiling.enabled: true to record them"
    return f"only {count(measured.ranks[0].count, 'batch')} measured; a verdict needs {FEWEST_BATCHES}"


def _each(pauses: Pauses, thing: str) -> str:
    return f", {count(pauses.count, thing)} of {duration(pauses.mean_s)}" if pauses.count else ""


def _longest_callback(rank: Spent) -> str:
    callbacks = {name: amount for name, amount in rank.seconds.items() if name.startswith(CALLBACKS)}
    return max(callbacks, key=callbacks.__getitem__, default="").removeprefix(CALLBACKS)


def notes(measured: Measured, conditions: Conditions) -> list[str]:
    """Return notes about conditions that distort the numbers, and about delayed saves."""
    return [*_postponed(measured), *(_notes(measured, conditions) if measured.timings else [])]


def _postponed(measured: Measured) -> Iterator[str]:
    if postponed := measured.postponed_saves:
        yield (
            f"{postponed} of {measured.saves.count} saves came later than they were due, since the previous one was "
            f"still being written: save less often, or to a faster file system"
        )


def _notes(measured: Measured, conditions: Conditions) -> Iterator[str]:
    ranks, slots = measured.ranks, conditions.slots
    if missing := list(islice((rank for rank in range(slots) if rank not in measured.timings), NAMED + 1)):
        names = ", ".join(map(str, missing[:NAMED])) + (" and more" if len(missing) > NAMED else "")
        yield f"timings of only {len(ranks)} of {count(slots, 'rank')}; missing: {names}"
    if slots > 1 and any(rank.exposed_s is None for rank in ranks):
        yield (
            "the time for which ranks wait for gradients is not measured here, and is part of train_batch: compare "
            "optimizations.aggregation_frequency 1 and 1000"
        )
    if measured.gpus() and not conditions.value("profiling.sync_timings", True):
        yield (
            "with profiling.sync_timings: false, timings show when a GPU received its work, not when that was "
            "complete: the next step that waits for it looks slow"
        )
    if measured.nodes and conditions.shares_nodes:
        yield "system metrics are of whole nodes, but this job has only a part of each: they include other jobs"
