"""What limits a training: one rule for a trial that was profiled and for short trainings that are compared.

Both give shares of the time that training waits for something. What takes a noticeable share limits the training, the
greatest first.

Of a profile, the shares are those of one rank. Ranks train in step, so a gang is as fast as its slowest rank: a second
less there is a second less for all. The others wait for it where gradients are exchanged, so it is the rank that waits
least itself, and its own communication is what the network costs.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean

from hpc_det.view.formatting import count, duration, percent
from hpc_det.view.performance.measured import Conditions, Measured, Pauses
from hpc_det.view.performance.timings import CALLBACKS, Part, Spent

NOTICEABLE = 0.1
"""A share of the time; less is not worth a change."""
IDLE = 0.3
"""A share of the time; the driver tells whether a GPU is busy only roughly, and timings themselves cost some of it."""
FEWEST_BATCHES = 20
"""With fewer, the first ones would decide, which are slower than all others."""


class Kind(str, enum.Enum):
    """What a verdict says, in words."""

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
    kind: Kind
    share: float | None = None
    """Of the time, on which it stands; None: unknown."""
    rank: Spent | None = None
    """The only one of several ranks with which it is so; the others wait for it."""


def limits(candidates: Iterable[Verdict], noise: float = 0.0) -> list[Verdict]:
    """Return those whose share of the time is noticeable, the greatest first.

    `noise`: the share by which the throughput varies by itself; what takes less is not known to be a limit.
    """
    found = [verdict for verdict in candidates if (verdict.share or 0) >= max(NOTICEABLE, noise)]
    return sorted(found, key=lambda verdict: -(verdict.share or 0))


# --- of a profile


def verdicts(measured: Measured) -> list[Verdict]:
    """Return what limits a trial by what was measured of it, the greatest first; at least one."""
    ranks = measured.known_ranks
    if not ranks or ranks[0].count < FEWEST_BATCHES:
        return [Verdict(kind=Kind.UNKNOWN)]
    return limits([*_bounds(ranks), *_slow_rank(ranks), *_idle_gpus(measured)]) or [_no_bound(measured)]


def _no_bound(measured: Measured) -> Verdict:
    if not measured.ranks:
        return Verdict(kind=Kind.UNKNOWN)
    return Verdict(kind=Kind.WELL_USED, share=slowest(measured.ranks).share(Part.COMPUTING))


def slowest(ranks: Sequence[Spent]) -> Spent:
    """The rank that the others wait for, of at least one."""
    waiting = _waiting(ranks)
    return min(ranks, key=lambda rank: rank.share(waiting))


def _waiting(ranks: Sequence[Spent]) -> Part:
    """What the waiting for other ranks is a part of: where nobody knows how long that takes, of train_batch."""
    return Part.COMPUTING if any(rank.exposed_s is None for rank in ranks) else Part.COMMUNICATING


def _bounds(ranks: Sequence[Spent]) -> list[Verdict]:
    """What the slowest rank's time goes into, in the order of parts."""
    slow, alone = slowest(ranks), _alone(ranks)
    parts = ((part, kind) for part, kind in _BOUNDS.items() if len(ranks) > 1 or part is not Part.COMMUNICATING)
    return [Verdict(kind=kind, share=slow.share(part), rank=slow if part is alone else None) for part, kind in parts]


def waited(ranks: Sequence[Spent]) -> float:
    """The share of their time for which the other ranks wait for the slowest one, on average."""
    slow, part = slowest(ranks), _waiting(ranks)
    others = [rank.share(part) for rank in ranks if rank is not slow]
    return fmean(others) - slow.share(part) if others else 0.0


def _alone(ranks: Sequence[Spent]) -> Part | None:
    """What the slowest rank does longer than the others, where they have to wait for it noticeably."""
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
    """Where what it does longer is no bound of its own: it computes."""
    slow, alone = slowest(ranks), _alone(ranks)
    if alone is None or (alone in _BOUNDS and slow.share(alone) >= NOTICEABLE):
        return []
    return [Verdict(kind=Kind.SLOW_RANK, share=waited(ranks), rank=slow)]


def _idle_gpus(measured: Measured) -> list[Verdict]:
    """Where the GPUs have nothing to do although the code that trains or validates runs."""
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
    rank = verdict.rank or slowest(measured.known_ranks)
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
