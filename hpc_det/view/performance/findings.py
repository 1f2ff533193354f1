"""The conclusions from the short trainings of `tune-throughput`, with remedies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpc_det.errors import count
from hpc_det.view.formatting import percent, ratio
from hpc_det.view.performance.advice import TUNE_THROUGHPUT, Advice, advice
from hpc_det.view.performance.limits import NOTICEABLE, Kind, Verdict, limits
from hpc_det.view.performance.measured import Conditions
from hpc_det.view.performance.short_trainings import Aim, Throughput

EFFICIENT = 0.8
"""Scaling efficiency from which on no remedy is suggested."""
_LIMITS = {Aim.INPUT: Kind.DATA_LOADER, Aim.COMMUNICATION: Kind.COMMUNICATION}
"""Limit of the experiment if a training that leaves out this work is noticeably faster."""
# an optimizer step follows each exchange, so a training that exchanges rarely leaves it out, too
_WAITS = {Aim.INPUT: "for data", Aim.COMMUNICATION: "for the exchange of gradients, optimizer steps included"}


@dataclass(frozen=True)
class Finding:
    """One conclusion from the trainings."""

    about: str
    text: str
    advice: tuple[Advice, ...] = ()


def findings(found: Sequence[Throughput], conditions: Conditions) -> list[Finding]:
    """Return the findings; the first one is the verdict.

    The baseline must have succeeded. Of the other measurements, failed ones do not count. `conditions`: those of the
    experiment as configured.
    """
    baseline = next(measured for measured in found if measured.measurement.aim is Aim.BASELINE)
    shares = {aim: share for aim in _LIMITS if (share := lost_share(found, aim, baseline)) is not None}
    parts = [
        *(_waiting(aim, share, baseline, conditions) for aim, share in shares.items()),
        *_batch_sizes(found, baseline),
        *_scaling(found, conditions),
        *_noise(baseline),
    ]
    return [_verdict(shares, baseline, conditions), *parts]


def lost_share(found: Sequence[Throughput], aim: Aim, baseline: Throughput) -> float | None:
    """Return the share of the baseline's time that the work takes which `aim` leaves out; None if unknown."""
    rates = [measured.samples_per_s for measured in found if measured.measurement.aim is aim]
    without = rates[0] if rates else None
    if not without or not baseline.samples_per_s:
        return None
    return max(1 - baseline.samples_per_s / without, 0.0)


def efficiency(measured: Throughput, found: Sequence[Throughput]) -> float | None:
    """Return the throughput per slot, relative to a training on one slot with the same batch per slot.

    None if unknown.
    """
    if measured.measurement.aim not in (Aim.BASELINE, Aim.SLOTS) or not measured.samples_per_s:
        return None
    alone = [each.samples_per_s for each in scaled(found) if each.measurement.slots == 1]
    return measured.samples_per_s / measured.measurement.slots / alone[0] if alone and alone[0] else None


def scaled(found: Sequence[Throughput]) -> list[Throughput]:
    """Return the successful trainings that differ only in slots, fewest first; empty unless there are two."""
    some = [each for each in found if each.measurement.aim in (Aim.BASELINE, Aim.SLOTS) and each.samples_per_s]
    return sorted(some, key=lambda each: each.measurement.slots) if len(some) > 1 else []


def sized(found: Sequence[Throughput]) -> list[Throughput]:
    """Return the trainings that differ only in batch size, smallest first; empty unless there are two."""
    some = [each for each in found if each.measurement.aim in (Aim.BASELINE, Aim.BATCH_SIZE)]
    return sorted(some, key=lambda each: each.measurement.batch_size or 0) if len(some) > 1 else []


def _verdict(shares: dict[Aim, float], baseline: Throughput, conditions: Conditions) -> Finding:
    """Return the verdict from the shares of the time that training waits."""
    if not shares:
        return Finding("verdict", "not known: nothing could be compared with the experiment as configured")
    candidates = [Verdict(kind=_LIMITS[aim], share=share) for aim, share in shares.items()]
    if found := limits(candidates, baseline.spread):
        return Finding("verdict", f"{found[0].kind.value}: {percent(found[0].share)} of the time")
    if unclear := limits(candidates):
        return Finding("verdict", f"not known: it may be {unclear[0].kind.value}, or noise")
    known = " and ".join(aim.value for aim in shares)
    text = f"{Kind.WELL_USED.value}: {known} cost less than {percent(NOTICEABLE)} of the time"
    return Finding("verdict", text, _advice(Verdict(kind=Kind.WELL_USED), conditions))


def _advice(verdict: Verdict, conditions: Conditions) -> tuple[Advice, ...]:
    """Return the advice except that of running `tune-throughput`, whose results these are."""
    return tuple(each for each in advice(verdict, conditions) if each.setting != TUNE_THROUGHPUT)


def _waiting(aim: Aim, share: float, baseline: Throughput, conditions: Conditions) -> Finding:
    verdict = Verdict(kind=_LIMITS[aim], share=share)
    text = f"training waits {percent(share)} of the time {_WAITS[aim]}"
    if limits([verdict], baseline.spread):
        return Finding(aim.value, text, _advice(verdict, conditions))
    return Finding(aim.value, f"{text}, which may be noise" if limits([verdict]) else f"{text}: no bottleneck")


def _batch_sizes(found: Sequence[Throughput], baseline: Throughput) -> Iterator[Finding]:
    sizes = sized(found)
    fit = [each for each in sizes if each.samples_per_s]
    if not sizes or not fit or not baseline.samples_per_s:
        return
    best = max(fit, key=lambda each: each.samples_per_s or 0)
    gain = (best.samples_per_s or 0) / baseline.samples_per_s
    end = _end_of(sizes, fit[-1])
    if gain < 1 + max(NOTICEABLE, baseline.spread):
        yield Finding(Aim.BATCH_SIZE.value, f"{_size(baseline)} is about as fast as larger ones; {end}")
        return
    yield Finding(
        Aim.BATCH_SIZE.value,
        f"{_size(best)} is the fastest, {ratio(gain)} times {_size(baseline)}; {end}",
        (
            Advice(
                text="use it, with a learning rate that suits it",
                setting=f"hyperparameters.global_batch_size: {_size(best)}",
            ),
        ),
    )


def _end_of(sizes: Sequence[Throughput], largest: Throughput) -> str:
    """Return why no larger batch was measured."""
    last = sizes[-1]
    if last.is_out_of_memory:
        return f"{_size(largest)} is the largest that fits into memory, {_size(last)} does not"
    if last.is_out_of_data:
        return f"an epoch has no whole batch of {_size(last)}"
    if last.failure:
        return f"{_size(last)} failed"
    return f"{_size(largest)} is the largest that was tried"


def _scaling(found: Sequence[Throughput], conditions: Conditions) -> Iterator[Finding]:
    shares = {each.measurement.slots: share for each in scaled(found) if (share := efficiency(each, found)) is not None}
    if len(shares) < 2:
        return
    most = max(shares)
    gain = ratio(most * shares[most])
    text = f"{count(most, 'slot')} are {gain} times as fast as one: {percent(shares[most])} efficiency"
    if shares[most] >= EFFICIENT:
        yield Finding(Aim.SLOTS.value, text)
        return
    good = max(slots for slots, share in shares.items() if share >= EFFICIENT)
    fewer = Advice(
        text=f"use the most slots with an efficiency of at least {percent(EFFICIENT)}",
        setting=f"resources.slots_per_trial: {good}",
    )
    exchange = _advice(Verdict(kind=Kind.COMMUNICATION, share=1 - shares[most]), conditions)
    yield Finding(Aim.SLOTS.value, text, (fewer, *exchange))


def _noise(baseline: Throughput) -> Iterator[Finding]:
    if baseline.spread >= NOTICEABLE:
        yield Finding(
            "noise",
            f"the throughput of the experiment as configured varies by {percent(baseline.spread)} while it trains: "
            f"smaller differences are not significant",
            (Advice(text="measure more batches, on nodes without other jobs", setting="--batches N"),),
        )


def _size(measured: Throughput) -> str:
    return str(measured.measurement.batch_size)
