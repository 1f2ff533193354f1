"""The table of advice: remedies for each limit of a training, and their settings.

It is the same for `hpc-det trial profile`, which has measurements of a trial, and for `hpc-det experiment
tune-throughput`, which has only its configuration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hpc_det.view.formatting import size
from hpc_det.view.performance.limits import NOTICEABLE, Kind, Verdict, slowest
from hpc_det.view.performance.measured import Conditions, Measured, Pauses
from hpc_det.view.performance.timings import Part, Spent

GOAL = 0.05
"""Share of the time that training still waits with a suggested setting."""
MOST_AGGREGATED = 16
"""Largest factor by which a suggestion raises `optimizations.aggregation_frequency`."""
BUSY_CPU = 90
"""CPU use of a node, in percent, from which on more workers would only compete for the cores."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One remedy."""

    text: str
    setting: str | None = None
    """A key of the experiment file with its value, a Python expression, or a command; None without one."""


TUNE_THROUGHPUT = "hpc-det experiment tune-throughput CONFIG"
_NOTHING_MEASURED = Measured()


def advice(verdict: Verdict, conditions: Conditions, measured: Measured = _NOTHING_MEASURED) -> list[Advice]:
    """Return remedies, the most promising first. `measured`: measurements of the trial, if it was profiled."""
    return list(_ADVICE[verdict.kind](verdict, measured, conditions))


def _data_loader(verdict: Verdict, measured: Measured, conditions: Conditions) -> Iterator[Advice]:
    cpus = [node.metrics["cpu_util"].mean for node in measured.nodes if "cpu_util" in node.metrics]
    if cpus and max(cpus) >= BUSY_CPU:
        yield Advice(text="the cores are busy: request more of them for each slot, or do less work for a record")
    else:
        workers = max(conditions.cpus_per_rank, 2)
        yield Advice(
            text="have worker processes load the next batches while the rank computes",
            setting=f"DataLoader(..., num_workers={workers}, persistent_workers=True)",
        )
    yield Advice(
        text="if the training data is on a shared file system, copy it to a disk of each node first (the cluster "
        "profile's scratch, $TMPDIR)"
    )
    yield Advice(text="store records decoded and in large files: shared file systems are slowest with small files")
    yield Advice(
        text="measure how fast training would be without loading: it trains on the first batch again and again",
        setting=TUNE_THROUGHPUT,
    )
    if verdict.rank:
        whose = f"rank {verdict.rank.rank} on {verdict.rank.host}"
        yield Advice(text=f"find what is different for {whose}: its share of the data, its disk, its network")


def _copy(verdict: Verdict, measured: Measured, conditions: Conditions) -> Iterator[Advice]:
    rank = verdict.rank or slowest(measured.ranks)
    if rank.seconds.get("from_device", 0.0) > rank.seconds.get("to_device", 0.0):
        yield Advice(text="return metrics as tensors from train_batch: each .item() and .cpu() waits for the device")
        yield _longer_unit(conditions)
        return
    yield Advice(
        text="load into pinned memory, from which a GPU copies asynchronously: keep the default",
        setting="DataLoader(..., pin_memory=None)",
    )
    yield Advice(text="send records in their smallest type, such as uint8 for images, and convert them on the device")


def _communication(verdict: Verdict, measured: Measured, conditions: Conditions) -> Iterator[Advice]:
    if measured.ranks and _reduces_metrics(slowest(measured.ranks)):
        if conditions.value("optimizations.average_training_metrics", True):
            setting = "optimizations.average_training_metrics: false"
            yield Advice(text="report the metrics of rank 0 instead of the mean of all ranks", setting=setting)
        yield _longer_unit(conditions)
    reason = "the gradients do not grow with the batch, and there are fewer exchanges"
    yield from _larger_batch(conditions, reason)
    yield from _cheaper_exchange(verdict, conditions)
    yield Advice(
        text="see what communication costs at most: throughput with aggregation_frequency 1 and 1000",
        setting=TUNE_THROUGHPUT,
    )


def _reduces_metrics(rank: Spent) -> bool:
    """Return whether the rank spends a noticeable share of its time reducing metrics."""
    return rank.seconds.get("reduce_metrics", 0.0) >= NOTICEABLE * sum(rank.parts().values())


def _cheaper_exchange(verdict: Verdict, conditions: Conditions) -> Iterator[Advice]:
    """Yield remedies for the exchange of gradients."""
    share = verdict.share or 0.0
    # with 1/factor of the exchanges, the waiting of share / factor is GOAL times the work of 1 - share
    factor = math.ceil(share / GOAL / (1 - share)) if share < 1 else MOST_AGGREGATED
    frequency = min(max(factor, 2), MOST_AGGREGATED) * conditions.value("optimizations.aggregation_frequency", 1)
    yield Advice(
        text="exchange gradients less often, if no larger batch fits; the effective batch grows by the same factor",
        setting=f"optimizations.aggregation_frequency: {frequency}",
    )
    if not conditions.value("optimizations.gradient_compression", False):
        yield Advice(text="send gradients in half precision", setting="optimizations.gradient_compression: true")
    if not conditions.value("optimizations.auto_tune_tensor_fusion", False):
        setting = "optimizations.auto_tune_tensor_fusion: true"
        yield Advice(text="find the best size of messages by measuring", setting=setting)
    if conditions.nodes > 1:
        setting = "resources.is_single_node: true"
        yield Advice(text="use fewer nodes, or one: links within a node are faster", setting=setting)


def _checkpoint(verdict: Verdict, measured: Measured, conditions: Conditions) -> Iterator[Advice]:
    if conditions.value("checkpoint_policy", "best") == "all":
        yield Advice(text="save after better validations only", setting="checkpoint_policy: best")
    if conditions.value("checkpoint_interval", "none") != "auto":
        yield Advice(
            text="save at the interval that minimises the expected lost work (Young/Daly)",
            setting="checkpoint_interval: auto",
        )
    if batches := _batches_between(measured.saves, measured):
        yield Advice(text="or save less often", setting=f"min_checkpoint_period: {{batches: {batches}}}")
    yield Advice(text="keep checkpoints on a faster file system", setting="checkpoint_storage")


def _validation(verdict: Verdict, measured: Measured, conditions: Conditions) -> Iterator[Advice]:
    if batches := _batches_between(measured.validations, measured):
        yield Advice(text="validate less often", setting=f"min_validation_period: {{batches: {batches}}}")
    yield Advice(
        text="give the validation's loader larger batches, which need no memory for gradients, and workers",
        setting=f"DataLoader(..., num_workers={max(conditions.cpus_per_rank, 2)})",
    )


def _callbacks(verdict: Verdict, measured: Measured, conditions: Conditions) -> Iterator[Advice]:
    yield Advice(text="do less in that callback, or skip the work in most of its calls")
    yield _longer_unit(conditions)


def _loop(verdict: Verdict, measured: Measured, conditions: Conditions) -> Iterator[Advice]:
    yield from _larger_batch(conditions, "the loop itself takes as long for a large batch as for a small one")


def _slow_rank(verdict: Verdict, measured: Measured, conditions: Conditions) -> Iterator[Advice]:
    assert verdict.rank
    host = verdict.rank.host
    yield Advice(
        text=f"compare clock rate, temperature and other processes of its slot on {host} with those of the others; "
        "`hpc-det doctor` on that host finds what is broken"
    )
    if conditions.scheduler == "slurm":
        name = host.partition(".")[0]
        yield Advice(text="exclude that node", setting=f"slurm.sbatch_args: [--exclude={name}]")
    yield Advice(text="check whether its batches are larger, or of longer records, than those of the others")


def _idle_gpus(verdict: Verdict, measured: Measured, conditions: Conditions) -> Iterator[Advice]:
    yield from _larger_batch(conditions, _free(measured) or "so that the GPU has more work in each step")
    yield Advice(text="find in a trace what the CPU does meanwhile", setting="context.set_profiler(...)")


def _well_used(verdict: Verdict, measured: Measured, conditions: Conditions) -> Iterator[Advice]:
    if conditions.value("optimizations.mixed_precision", "O0") == "O0":
        setting = "optimizations.mixed_precision: O1"
        yield Advice(text="compute in half precision, unless the trial already does", setting=setting)
    yield Advice(text="find in a trace what the model computes", setting="context.set_profiler(...)")
    yield Advice(
        text="use more slots and a larger global batch in proportion (weak scaling); first measure the gain",
        setting=TUNE_THROUGHPUT,
    )


def _unknown(verdict: Verdict, measured: Measured, conditions: Conditions) -> Iterator[Advice]:
    if not conditions.value("profiling.enabled", False):
        yield Advice(text="measure a trial, on nodes with nothing else on them", setting="profiling.enabled: true")
    elif not measured.timings:
        yield Advice(
            text="try again in a few seconds: ranks write their measurements every 10 s. Only trials and the Trainer "
            "of hpc_det.pytorch are measured"
        )
    else:
        yield Advice(text="measure more batches: set profiling.begin_on_batch and end_after_batch, or train longer")


_ADVICE: dict[Kind, Callable[[Verdict, Measured, Conditions], Iterator[Advice]]] = {
    Kind.DATA_LOADER: _data_loader,
    Kind.COPY: _copy,
    Kind.COMMUNICATION: _communication,
    Kind.VALIDATION: _validation,
    Kind.CHECKPOINT: _checkpoint,
    Kind.CALLBACKS: _callbacks,
    Kind.LOOP: _loop,
    Kind.SLOW_RANK: _slow_rank,
    Kind.IDLE_GPUS: _idle_gpus,
    Kind.WELL_USED: _well_used,
    Kind.UNKNOWN: _unknown,
}


def _larger_batch(conditions: Conditions, reason: str) -> Iterator[Advice]:
    batch = conditions.hparams.get("global_batch_size")
    setting = f"hyperparameters.global_batch_size: {2 * batch}" if isinstance(batch, int) else None
    yield Advice(text=f"use the largest batch that fits into a GPU, times the slots: {reason}", setting=setting)
    yield Advice(
        text="with it, raise the learning rate over the first epochs, or use an optimizer for large batches (LARS, "
        "LAMB, RAdam)"
    )


def _longer_unit(conditions: Conditions) -> Advice:
    unit = conditions.value("scheduling_unit", 100)
    return Advice(text="report training metrics less often", setting=f"scheduling_unit: {10 * unit}")


def _free(measured: Measured) -> str | None:
    free = [gpu["memory_free"].low for gpu in measured.gpus() if "memory_free" in gpu]
    return f"at least {size(min(free))} of memory are free on each" if free else None


def _batches_between(pauses: Pauses, measured: Measured) -> int | None:
    """Return how many batches to train between two pauses, so that pauses take GOAL of the time.

    Rounded up to two digits; None if unknown.
    """
    if not pauses.count:
        return None
    rank = slowest(measured.known_ranks)
    parts = rank.parts()
    batch_s = (sum(parts.values()) - parts[Part.SAVING] - parts[Part.VALIDATING]) / rank.count
    if batch_s <= 0:
        return None
    batches = math.ceil(pauses.mean_s * (1 - GOAL) / GOAL / batch_s)
    unit: int = 10 ** max(len(str(batches)) - 2, 0)
    return max(math.ceil(batches / unit) * unit, 1)
