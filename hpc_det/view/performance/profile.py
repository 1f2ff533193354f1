"""The profile of a trial as plain data, which `trial profile --json` prints and the report draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from hpc_det.store.folders import TrialFolder
from hpc_det.view.metric_history import MetricHistory
from hpc_det.view.performance.advice import advice
from hpc_det.view.performance.limits import Verdict, notes, slowest, verdicts, why
from hpc_det.view.performance.measured import Conditions, Measured, conditions, measured
from hpc_det.view.performance.system import GPU_UNITS, UNITS, NodeUse, Usage, Usages
from hpc_det.view.performance.timings import Spent
from hpc_det.view.state import ExperimentView

Record = dict[str, Any]


def profile(view: ExperimentView, trial: TrialFolder, history: MetricHistory | None = None) -> Record:
    """Return the record of a trial. `history`: its metrics, if they were read already.

    Raises HpcDetError if files of the experiment are damaged.
    """
    return recorded(measured(trial, history), conditions(view, trial))


def recorded(found: Measured, under: Conditions) -> Record:
    """Return the record of these measurements, with verdicts and advice."""
    first, *also = [_verdict(verdict, found, under) for verdict in verdicts(found)]
    ranks = found.ranks
    return {
        **first,
        "also": also,
        "notes": notes(found, under),
        "ranks": len(ranks),
        "batches": ranks[0].count if ranks else 0,
        "samples_per_second": found.samples_per_second,
        "parts": {part.value: amount for part, amount in slowest(ranks).parts().items()} if ranks else {},
        "timings": _timings(ranks),
        "nodes": [_node(node) for node in found.nodes],
    }


def _verdict(verdict: Verdict, found: Measured, under: Conditions) -> Record:
    rank = verdict.rank
    return {
        "verdict": verdict.kind.value,
        "share": verdict.share,
        "why": why(verdict, found),
        "rank": {"rank": rank.rank, "host": rank.host} if rank else None,
        "advice": [asdict(its) for its in advice(verdict, under, found)],
    }


EXPOSED = "exposed_communication"
"""Name of the timing of gradient exchanges that computing does not hide; the time is also a part of train_batch."""


def _timings(ranks: Sequence[Spent]) -> list[Record]:
    """Return the timings, longest first."""
    names = dict.fromkeys(name for rank in ranks for name in rank.seconds)
    found = [_timing(name, ranks, [rank.seconds.get(name, 0.0) for rank in ranks]) for name in names]
    if known := [rank for rank in ranks if rank.exposed_s is not None]:
        found.append(_timing(EXPOSED, known, [rank.exposed_s or 0.0 for rank in known]))
    return sorted(found, key=lambda timing: -timing["mean_s"])


def _timing(name: str, ranks: Sequence[Spent], seconds: Sequence[float]) -> Record:
    longest_s, rank = max(zip(seconds, ranks, strict=True), key=lambda pair: pair[0])
    walls, batches = sum(rank.wall_s for rank in ranks), sum(rank.count for rank in ranks)
    return {
        "timing": name,
        "mean_s": fmean(seconds),
        "share": sum(seconds) / walls if walls else 0.0,
        "batch_s": sum(seconds) / batches if batches else 0.0,
        "longest_s": longest_s,
        "longest_rank": rank.rank,
        "longest_host": rank.host,
    }


def _node(node: NodeUse) -> Record:
    return {
        "host": node.host,
        "samples": node.samples,
        "metrics": _usages(node.metrics, UNITS),
        "gpus": {uuid: _usages(usages, GPU_UNITS) for uuid, usages in sorted(node.gpus.items())},
    }


def _usages(usages: Usages, units: dict[str, str]) -> Record:
    return {name: _usage(usages[name]) for name in units if name in usages}


def _usage(usage: Usage) -> Record:
    return {"mean": usage.mean, "min": usage.low, "max": usage.high}
