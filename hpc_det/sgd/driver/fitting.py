"""fit: a function of the user's on every rank of an elastic gang, as with today's Ray Train (Ray 2.60).

Where a rank dies, or the gang gets another size, the function begins anew on all ranks, with the last checkpoint that
was committed. Reports is the driver's end of `report`: a barrier, the checkpoints, and what came of it all.

RUN/checkpoints/   a folder each, committed by rename when all ranks have reported
    reports.jsonl  a line for each report
    finished.json  the function has returned on all ranks
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hpc_det.checkpoint.committed import Committed, committed, newest_good
from hpc_det.checkpoint.committed_folder import delete
from hpc_det.checkpoint.damaged import set_aside
from hpc_det.checkpoint.retention import superfluous
from hpc_det.checkpoint.seals import FileEntry
from hpc_det.checkpoint.staging import Staging
from hpc_det.errors import UsageError, shown
from hpc_det.node.files import make_private
from hpc_det.node.json_files import append_line, read_counted, write_json
from hpc_det.sgd.capacity import Capacity, capacity_of
from hpc_det.sgd.driver.failures import GangLost
from hpc_det.sgd.driver.gang import RankGang
from hpc_det.sgd.driver.nodes import GangRequest, Patience
from hpc_det.sgd.driver.opening import on_devices, opened, wanted_of
from hpc_det.sgd.rank import RankSettings
from hpc_det.sgd.rank.train_loop import Begin, Checkpoint, LoopOperator, TrainLoop, uuid_of
from hpc_det.store.metrics import number_or_nan
from hpc_det.store.run_folder import run_of

_log = logging.getLogger("hpc_det.sgd")

RESIZE_S = 60.0
"""A gang of another size than it could have goes on for so long at least: a restart costs what setting up costs."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of a `fit`."""

    metrics: dict[str, Any] | None
    """Rank 0's, of the last report."""
    checkpoint: Checkpoint | None
    """The last one."""
    path: Path
    """The run folder."""
    metrics_history: list[dict[str, Any]]
    """Rank 0's, of every report."""
    best_checkpoints: list[tuple[Checkpoint, dict[str, Any]]]
    """Those that were kept, with their metrics: the best first, or without a `metric` the newest."""


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Which checkpoints: the `most` best by this metric, without one the newest; None: all."""

    most: int | None
    metric: str | None
    mode: Literal["min", "max"]


def fit(
    train_loop_per_worker: Callable[..., Any],
    *,
    train_loop_config: Mapping[str, Any] | None = None,
    num_workers: int | tuple[int, int] = 1,
    num_cpus_per_worker: int = 1,
    use_gpu: bool | Literal["auto"] = "auto",
    executor: str | Capacity | None = None,
    initialization_hook: Callable[[], None] | None = None,
    run: str | os.PathLike[str] | None = None,
    max_failures: int = 3,
    num_to_keep: int | None = None,
    metric: str | None = None,
    mode: Literal["min", "max"] = "min",
    timeout_s: float = 1800.0,
    heartbeat_timeout_s: float = 10.0,
    startup_timeout_s: float | None = None,
    hang_timeout_s: int | None = None,
) -> Result:
    """Run `train_loop_per_worker(train_loop_config)` on every rank until it returns on all of them.

    `num_workers`: how many ranks, or (fewest, most) of an elastic gang. Placement as TorchTrainer's, and `run`, too: a
    call with the run of one that was ended goes on from its last checkpoint. `max_failures`: how often ranks may die;
    preemptions do not count. `num_to_keep`: of the checkpoints, the best by `metric` and `mode`; None: all.
    `hang_timeout_s`: seconds without a report after which the gang counts as hung (None: 20 times the longest time
    between reports so far, at least four hours; no limit before the first report of any rank).

    What the function raises on a rank is raised here at once, with that rank's traceback as its cause. Raises
    RetriesUsedUp (a RuntimeError), NotEnoughRanks (a TimeoutError), and UsageError for what cannot be done.
    """
    least, most = num_workers if isinstance(num_workers, tuple) else (num_workers, num_workers)
    _check(train_loop_per_worker, least, most, max_failures, num_to_keep, mode)
    capacity = capacity_of(executor, num_workers=most, cpus_per_worker=num_cpus_per_worker, use_gpu=use_gpu)
    its_run = run_of(run, os.environ)
    path = its_run.folder.path
    reports = Reports(path, Keep(most=num_to_keep, metric=metric, mode=mode))
    if reports.is_finished:
        return reports.result()
    settings = RankSettings(
        operator_cls=LoopOperator,
        config={},
        num_workers=most,
        **on_devices(capacity, use_gpu=use_gpu, timeout_s=timeout_s),
    )
    wanted = wanted_of(
        capacity, num_workers=most, min_workers=least, settings=lambda size: settings, hook=initialization_hook
    )
    patience = Patience(
        heartbeat_timeout_s=heartbeat_timeout_s,
        startup_timeout_s=startup_timeout_s,
        hang_timeout_s=hang_timeout_s,
    )

    def begun(gang: RankGang) -> TrainLoop:
        return TrainLoop(train_loop_per_worker, train_loop_config, reports.begin(gang, wanted, path.name))

    elastic = opened(its_run, capacity, patience, wanted, is_durable=False)
    has_returned = False
    try:
        elastic.loop(begun, max_failures)
        has_returned = True
    finally:
        elastic.stop(force=not has_returned)
    reports.finish()
    return reports.result()


def _check(function: Any, least: Any, most: Any, max_failures: int, num_to_keep: int | None, mode: str) -> None:
    problems = []
    if not callable(function):
        problems.append(f"train_loop_per_worker: got {shown(function)}; give the function that every rank runs")
    if not (isinstance(least, int) and isinstance(most, int) and 1 <= least <= most):
        problems.append(f"num_workers: got {shown((least, most))}; give a number >= 1, or (fewest, most)")
    if max_failures < 0:
        problems.append(f"max_failures: got {max_failures}; expected >= 0")
    if num_to_keep is not None and num_to_keep < 1:
        problems.append(f"num_to_keep: got {num_to_keep}; expected >= 1, or None for all")
    if mode not in ("min", "max"):
        problems.append(f"mode: got {shown(mode)}; expected 'min' or 'max'")
    if problems:
        raise UsageError(problems)


class Resized(GangLost):
    """The gang can be formed larger, or without a node that is to be taken away."""

    counts = False


class Reports:
    """What ranks tell on their way, in the driver."""

    def __init__(self, run: Path, keep: Keep) -> None:
        self._run = run
        self._keep = keep
        self._checkpoints = run / "checkpoints"
        make_private(self._checkpoints)

    @property
    def is_finished(self) -> bool:
        return (self._run / "finished.json").exists()

    def finish(self) -> None:
        write_json(self._run / "finished.json", {"time": time.time()})

    def begin(self, gang: RankGang, wanted: GangRequest, name: str) -> Begin:
        """Of a gang: what the one before had not finished is void."""
        self._gang, self._wanted = gang, wanted
        self._heard: dict[int, dict[str, Any]] = {}
        self._formed_at = time.monotonic()
        self._attempt = secrets.token_hex(4)
        for leftover in self._checkpoints.glob(".partial-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        newest, skipped = newest_good(self._checkpoints, set_aside=set_aside)
        for problem in skipped:
            _log.warning("skipped: %s", problem)
        gang.on_report = self._hear
        return Begin(
            name=name,
            checkpoints=self._checkpoints,
            attempt=self._attempt,
            reports=newest.steps if newest else 0,
            checkpoint=str(newest.path) if newest else None,
        )

    def result(self) -> Result:
        lines = self._lines()
        metrics = {line["report"]: line["metrics"] for line in lines}
        kept = committed(self._checkpoints)
        best = sorted(kept, key=lambda one: self._badness(metrics.get(one.steps, {})))
        return Result(
            metrics=lines[-1]["metrics"] if lines else None,
            checkpoint=Checkpoint(str(kept[0].path)) if kept else None,
            path=self._run,
            metrics_history=[line["metrics"] for line in lines],
            best_checkpoints=[(Checkpoint(str(one.path)), metrics.get(one.steps, {})) for one in best],
        )

    def _badness(self, metrics: Mapping[str, Any]) -> tuple[bool, float]:
        if self._keep.metric is None:
            return False, 0.0
        value = number_or_nan(metrics.get(self._keep.metric))
        return value != value, value if self._keep.mode == "min" else -value

    def _lines(self) -> list[dict[str, Any]]:
        """Without those that a restart has made void."""
        return read_counted(self._run / "reports.jsonl", "report")

    def _hear(self, rank: int, head: dict[str, Any]) -> None:
        """A barrier: nobody goes on before all have told the same report."""
        self._heard[rank] = head
        said = {(told["report"], "ended" in told) for told in self._heard.values()}
        if len(said) > 1:
            raise UsageError(f"report: every rank calls it equally often; {self._in_words()}")
        if len(self._heard) < self._gang.size:
            return
        heard, self._heard = self._heard, {}
        if "ended" not in head:
            self._take(head["report"], [heard[rank] for rank in sorted(heard)])
        for each in self._gang.ranks:
            each.send({"do": "heard"})

    def _in_words(self) -> str:
        return ", ".join(
            f"rank {rank} has " + ("returned" if "ended" in told else "called it") + f" ({told['report']})"
            for rank, told in sorted(self._heard.items())
        )

    def _take(self, report: int, told: list[dict[str, Any]]) -> None:
        checkpoint = self._commit(report, [rank["files"] for rank in told])
        line = {"report": report, "metrics": told[0]["metrics"], "checkpoint": checkpoint and checkpoint.uuid}
        append_line(self._run / "reports.jsonl", {**line, "time": time.time()})
        if checkpoint:
            self._prune()
            self._resize()

    def _commit(self, report: int, files: list[dict[str, Any] | None]) -> Committed | None:
        entries: dict[str, FileEntry] = {}
        for rank, own in enumerate(files):
            if twice := entries.keys() & (own or {}).keys():
                raise UsageError(
                    f"report: rank {rank} and one before it both gave {', '.join(sorted(twice))} as part of a "
                    f"checkpoint; use different names, or let rank 0 alone give a checkpoint"
                )
            entries |= {name: FileEntry(**entry) for name, entry in (own or {}).items()}
        if not entries:
            return None
        return Staging(self._checkpoints, uuid_of(report, self._attempt)).commit(report, entries)

    def _prune(self) -> None:
        if self._keep.most is None:
            return
        by_metric = self._keep.metric is not None
        values = {line["report"]: number_or_nan(line["metrics"].get(self._keep.metric)) for line in self._lines()}
        for checkpoint in superfluous(
            committed(self._checkpoints),
            values if by_metric else {},
            smaller_is_better=self._keep.mode == "min",
            best=self._keep.most,
            latest=1 if by_metric else self._keep.most,
        ):
            delete(checkpoint.path, hidden=f".partial-{checkpoint.uuid}")

    def _resize(self) -> None:
        """The work is safe just now: the moment for another size costs the least."""
        gang, wanted = self._gang, self._wanted
        possible = wanted.possible(gang.nodes)
        leaves = any(rank.node.is_leaving for rank in gang.ranks)
        is_time = time.monotonic() > self._formed_at + RESIZE_S
        if (leaves or (possible > gang.size and is_time)) and possible >= wanted.least:
            raise Resized(f"{gang.size} ranks become {possible}")
