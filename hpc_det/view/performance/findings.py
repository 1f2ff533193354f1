"""What the measurements show, in words, with the settings to try."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpc_det.view.formatting import percent, ratio
from hpc_det.view.performance.short_trainings import Aim, Measured

NOTICEABLE = 0.1
"""A share of the time, or of the throughput, that is worth a word."""
EFFICIENT = 0.8

_INPUT = (
    "load in workers (num_workers of the DataLoader) and raise their number up to cpus_per_slot",
    "copy the data to a disk of the node (the cluster profile's scratch, $TMPDIR) when the trial begins",
    "keep records decoded and in large files: small files are what shared folders are slowest at",
)
_EXCHANGE = "for the exchange of gradients, optimizer steps included"
_COMMUNICATION = (
    "hyperparameters.global_batch_size: more records between two exchanges",
    "optimizations.aggregation_frequency=2 or more: fewer exchanges, and larger effective batches",
    "optimizations.gradient_compression=true: half the bytes",
    "optimizations.auto_tune_tensor_fusion=true: messages of the size that takes least",
    "fewer nodes, or resources.is_single_node=true: links within a node are faster",
)
_MODEL = (
    "optimizations.mixed_precision=O1: half precision, where the slots compute faster in it",
    "a look at the model with context.set_profiler",
)


@dataclass(frozen=True)
class Finding:
    about: str
    text: str
    settings: tuple[str, ...] = ()
    """What to try."""


def findings(found: Sequence[Measured]) -> list[Finding]:
    """The first one is the verdict. Measurements that failed say nothing here; the baseline must not be one of them."""
    baseline = next(measured for measured in found if measured.measurement.aim is Aim.BASELINE)
    parts = [
        *_waiting(found, Aim.INPUT, baseline, "for data", _INPUT),
        *_waiting(found, Aim.COMMUNICATION, baseline, _EXCHANGE, _COMMUNICATION),
        *_batch_sizes(found, baseline),
        *_scaling(found),
        *_noise(baseline),
    ]
    return [_verdict(found, baseline), *parts]


def lost_share(found: Sequence[Measured], aim: Aim, baseline: Measured) -> float | None:
    """Of the baseline's time, what it would not take without the work that `aim` leaves out; None: not known."""
    rates = [measured.samples_per_s for measured in found if measured.measurement.aim is aim]
    without = rates[0] if rates else None
    if not without or not baseline.samples_per_s:
        return None
    return max(1 - baseline.samples_per_s / without, 0.0)


def noticeable(baseline: Measured) -> float:
    """From which share on a difference is more than what the throughput varies by itself."""
    return max(NOTICEABLE, baseline.spread)


def efficiency(measured: Measured, found: Sequence[Measured]) -> float | None:
    """Of the same batch per slot: the throughput of a slot as a share of that of one slot alone; None: not known."""
    if measured.measurement.aim not in (Aim.BASELINE, Aim.SLOTS) or not measured.samples_per_s:
        return None
    alone = [each.samples_per_s for each in scaled(found) if each.measurement.slots == 1]
    return measured.samples_per_s / measured.measurement.slots / alone[0] if alone and alone[0] else None


def scaled(found: Sequence[Measured]) -> list[Measured]:
    """The successful ones that differ in slots alone, the fewest first; none where there are no two."""
    some = [each for each in found if each.measurement.aim in (Aim.BASELINE, Aim.SLOTS) and each.samples_per_s]
    return sorted(some, key=lambda each: each.measurement.slots) if len(some) > 1 else []


def sized(found: Sequence[Measured]) -> list[Measured]:
    """Those that differ in the size of batches alone, the smallest first; none where there are no two."""
    some = [each for each in found if each.measurement.aim in (Aim.BASELINE, Aim.BATCH_SIZE)]
    return sorted(some, key=lambda each: each.measurement.batch_size or 0) if len(some) > 1 else []


def _verdict(found: Sequence[Measured], baseline: Measured) -> Finding:
    named = {Aim.INPUT: "data loader bound", Aim.COMMUNICATION: "communication bound"}
    shares = {aim: share for aim in named if (share := lost_share(found, aim, baseline)) is not None}
    worst = max(shares, key=lambda aim: shares[aim], default=None)
    if worst is None:
        return Finding("verdict", "not known: nothing could be compared with the experiment as configured")
    if shares[worst] >= noticeable(baseline):
        return Finding("verdict", f"{named[worst]}: {percent(shares[worst])} of the time")
    if shares[worst] >= NOTICEABLE:
        return Finding("verdict", f"not known: it may be {named[worst]}, or noise")
    known = " and ".join(aim.value for aim in shares)
    return Finding("verdict", f"well used: {known} cost less than {percent(NOTICEABLE)} of the time", _MODEL)


def _waiting(
    found: Sequence[Measured], aim: Aim, baseline: Measured, what: str, settings: tuple[str, ...]
) -> Iterator[Finding]:
    share = lost_share(found, aim, baseline)
    if share is None:
        return
    text = f"training waits {percent(share)} of the time {what}"
    if share < NOTICEABLE:
        yield Finding(aim.value, f"{text}: no bottleneck")
    elif share < noticeable(baseline):
        yield Finding(aim.value, f"{text}, which may be noise")
    else:
        yield Finding(aim.value, text, settings)


def _batch_sizes(found: Sequence[Measured], baseline: Measured) -> Iterator[Finding]:
    sizes = sized(found)
    fit = [each for each in sizes if each.samples_per_s]
    if not sizes or not fit or not baseline.samples_per_s:
        return
    best = max(fit, key=lambda each: each.samples_per_s or 0)
    gain = (best.samples_per_s or 0) / baseline.samples_per_s
    end = _end_of(sizes, fit[-1])
    if gain < 1 + noticeable(baseline):
        yield Finding(Aim.BATCH_SIZE.value, f"{_size(baseline)} is about as fast as larger ones; {end}")
        return
    yield Finding(
        Aim.BATCH_SIZE.value,
        f"{_size(best)} is the fastest, {ratio(gain)} times {_size(baseline)}; {end}",
        (f"hyperparameters.global_batch_size={_size(best)}, with a learning rate that goes with it",),
    )


def _end_of(sizes: Sequence[Measured], largest: Measured) -> str:
    last = sizes[-1]
    if last.is_out_of_memory:
        return f"{_size(largest)} is the largest that fits into memory, {_size(last)} does not"
    if last.is_out_of_data:
        return f"{_size(largest)} is the largest of which an epoch has one"
    if last.failure:
        return f"{_size(last)} failed"
    return f"{_size(largest)} is the largest that was tried"


def _scaling(found: Sequence[Measured]) -> Iterator[Finding]:
    shares = {each.measurement.slots: share for each in scaled(found) if (share := efficiency(each, found)) is not None}
    if len(shares) < 2:
        return
    most = max(shares)
    gain = ratio(most * shares[most])
    text = f"{most} slots are {gain} times as fast as one: {percent(shares[most])} of what is possible"
    if shares[most] >= EFFICIENT:
        yield Finding(Aim.SLOTS.value, text)
        return
    good = max(slots for slots, share in shares.items() if share >= EFFICIENT)
    limit = f"the most whose slots do at least {percent(EFFICIENT)} of what one does alone"
    fewer = f"resources.slots_per_trial={good}: {limit}"
    yield Finding(Aim.SLOTS.value, text, (fewer, *_COMMUNICATION[:2]))


def _noise(baseline: Measured) -> Iterator[Finding]:
    if baseline.spread >= NOTICEABLE:
        yield Finding(
            "noise",
            f"the throughput of the experiment as configured varies by {percent(baseline.spread)} while it trains: "
            f"smaller differences show nothing",
            ("more --batches, on nodes that nobody else uses",),
        )


def _size(measured: Measured) -> str:
    return str(measured.measurement.batch_size)
