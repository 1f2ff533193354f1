"""fit: a training function of the user on every rank of an elastic gang, as in Ray Train (Ray 2.60).

If a rank dies, or the gang changes its size, the function starts again on all ranks, from the last committed
checkpoint. Reports is the driver's side of `report`: a barrier, the checkpoints, and the result.

RUN/checkpoints/   one folder per checkpoint, committed by a rename when all ranks have reported
    reports.jsonl  one line per report
    finished.json  written when the function has returned on all ranks
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
from hpc_det.errors import UsageError, count, shown
from hpc_det.node.files import make_private
from hpc_det.node.json_files import append_line, read_counted, write_json
from hpc_det.plan.local_experiment import SEARCHER, GangSize
from hpc_det.sgd.capacity import Capacity, capacity_of
from hpc_det.sgd.driver.experiment import Description, named
from hpc_det.sgd.driver.failures import GangLost
from hpc_det.sgd.driver.gang import RankGang
from hpc_det.sgd.driver.nodes import GangRequest, Patience
from hpc_det.sgd.driver.opening import on_devices, opened, wanted_of
from hpc_det.sgd.driver.recorded import RunRecord
from hpc_det.sgd.rank import RankSettings
from hpc_det.sgd.rank.train_loop import Begin, Checkpoint, LoopOperator, TrainLoop, uuid_of
from hpc_det.store.metrics import number_or_nan
from hpc_det.store.run_folder import run_of

_log = logging.getLogger("hpc_det.sgd")

RESIZE_S = 60.0
"""Minimum seconds that a gang runs before it is formed again with more ranks, as in Ray Train: the training function
starts again on all ranks then, and repeats its setup.
"""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of `fit`."""

    metrics: dict[str, Any] | None
    """Metrics of rank 0 in the last report; None if nothing was reported."""
    checkpoint: Checkpoint | None
    """The newest checkpoint; None if there is none."""
    path: Path
    """The run folder."""
    metrics_history: list[dict[str, Any]]
    """Metrics of rank 0 in each report, oldest first."""
    best_checkpoints: list[tuple[Checkpoint, dict[str, Any]]]
    """The kept checkpoints with their metrics: the best first, or, without a `metric`, the newest first."""


@dataclass(frozen=True, kw_only=True)
class Keep:
    """The checkpoints to keep."""

    most: int | None
    """Number of checkpoints; None keeps all."""
    metric: str | None
    """Metric that selects the best; None keeps the newest."""
    mode: Literal["min", "max"]
    """Whether smaller ("min") or larger ("max") values of the metric are better."""


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
    """Run a training function on every rank of a gang until it has returned on all of them.

    In the function, call `report`, `get_checkpoint`, `get_context`, `prepare_model` and `prepare_data_loader`. If a
    rank dies, or the gang changes its size, the function starts again on all ranks, and `get_checkpoint` returns the
    last committed checkpoint. If `run` names a run that an earlier program did not finish, the function continues from
    that run's last checkpoint; if it names a finished run, `fit` returns its result at once.

    Args:
        train_loop_per_worker: The training function. It is called with `train_loop_config` if it has a parameter.
        train_loop_config: Passed to the function as a dict. None: an empty dict.
        num_workers: Number of ranks, or `(fewest, most)` for an elastic gang.
        num_cpus_per_worker: CPUs that a rank takes on a node without GPUs.
        use_gpu: Whether each rank takes a GPU. "auto": if the nodes have GPUs.
        executor: Where the ranks run; see TorchTrainer.
        initialization_hook: A function without arguments that every rank calls first. None: no hook.
        run: A name below $HPC_DET_ROOT/sgd, or a path with a slash: the run folder. None: in a job the run of that job,
            else a temporary run.
        max_failures: How many failures are retried: ranks that die, hang or lose their connection. Preemptions do not
            count.
        num_to_keep: Number of checkpoints to keep: the best by `metric`, or the newest without one. None: all.
        metric: Name of the reported metric that determines the best checkpoints.
        mode: Whether smaller ("min") or larger ("max") values of `metric` are better.
        timeout_s: Seconds after which a collective fails. With GPUs the environment variable NCCL_TIMEOUT_S, if set,
            overrides it.
        heartbeat_timeout_s: Seconds without a message after which a node counts as lost.
        startup_timeout_s: Seconds to wait for the smallest number of ranks. None: 100 s, or without limit if the ranks'
            jobs wait in a queue.
        hang_timeout_s: Seconds without a report after which the gang counts as hung. None: 20 times the longest time
            between two reports of this gang, at least 4 hours; no limit before the first report of any rank.

    Returns:
        Metrics, checkpoints and the run folder.

    Raises:
        UsageError: An argument is invalid, `executor` cannot be used, another program uses the run, or ranks called
            `report` inconsistently.
        NotEnoughRanks: A TimeoutError; too few ranks started in time.
        RetriesUsedUp: A RuntimeError; ranks failed more than `max_failures` times.
        JobLeaves: A SystemExit with code 75; the scheduler takes all nodes of the job.
        Exception: Any exception that the function raises on a rank, with that rank's traceback as its cause. It is not
            retried.
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

    about = Description(
        name=named(run),
        hparams=train_loop_config or {},
        sections={
            "searcher": {**SEARCHER, "metric": metric or "loss", "smaller_is_better": mode == "min", "max_length": None}
        },
        size=GangSize(nodes=1, ranks_per_node=wanted.most, has_gpus=settings.use_gpu),
    )
    # Not durable: the loop saves its own checkpoints.
    elastic = opened(its_run, capacity, patience, wanted, about, is_durable=False, is_loop=True)
    reports.record = elastic.record
    error: BaseException | None = None
    try:
        elastic.loop(begun, max_failures)
        reports.finish()
    except BaseException as raised:
        error = raised
        raise
    finally:
        try:
            elastic.stop(force=error is not None)
        finally:
            elastic.record.end(error)
    return reports.result()


def _check(function: Any, least: Any, most: Any, max_failures: int, num_to_keep: int | None, mode: str) -> None:
    problems = []
    if not callable(function):
        problems.append(f"train_loop_per_worker: got {shown(function)}; give the function that every rank runs")
    if not (isinstance(least, int) and isinstance(most, int) and 1 <= least <= most):
        problems.append(
            f"num_workers: got {shown((least, most))}; give a number >= 1, or (fewest, most) with 1 <= fewest <= most"
        )
    if max_failures < 0:
        problems.append(f"max_failures: got {max_failures}; expected >= 0")
    if num_to_keep is not None and num_to_keep < 1:
        problems.append(f"num_to_keep: got {num_to_keep}; expected >= 1, or None for all")
    if mode not in ("min", "max"):
        problems.append(f"mode: got {shown(mode)}; expected 'min' or 'max'")
    if problems:
        raise UsageError(problems)


class Resized(GangLost):
    """The gang can grow, or can be formed without a node that will be taken away."""

    counts = False


class Reports:
    """The reports of the ranks of a training loop, in the driver."""

    def __init__(self, run: Path, keep: Keep) -> None:
        self._run = run
        self._keep = keep
        self.record = RunRecord()
        """The record of the run, which receives the reports too."""
        self._checkpoints = run / "checkpoints"
        make_private(self._checkpoints)

    @property
    def is_finished(self) -> bool:
        """True if the training function has returned on all ranks, in this or an earlier program."""
        return (self._run / "finished.json").exists()

    def finish(self) -> None:
        """Record that the training function has returned on all ranks."""
        write_json(self._run / "finished.json", {"time": time.time()})

    def begin(self, gang: RankGang, wanted: GangRequest, name: str) -> Begin:
        """Remove the checkpoints that an earlier gang did not commit, and return the start of the new gang's ranks."""
        self._gang, self._wanted = gang, wanted
        self._heard: dict[int, dict[str, Any]] = {}
        """The messages of the ranks that have sent the current report, by rank."""
        self._formed_at = time.monotonic()
        self._attempt = secrets.token_hex(4)
        # No rank of an earlier gang will complete them: a commit needs the reports of all its ranks.
        for leftover in self._checkpoints.glob(".partial-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        newest, skipped = newest_good(self._checkpoints, set_aside=set_aside)
        for problem in skipped:
            _log.warning("checkpoint skipped: %s", problem)
        gang.on_report = self._hear
        self.record.starts_from(newest.steps if newest else 0)
        return Begin(
            name=name,
            checkpoints=self._checkpoints,
            attempt=self._attempt,
            reports=newest.steps if newest else 0,
            checkpoint=str(newest.path) if newest else None,
        )

    def result(self) -> Result:
        """Return the result up to the last report, from the files of the run."""
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
        """Return a sort key that is smaller for better metrics; those without the metric or with NaN come last."""
        if self._keep.metric is None:
            return False, 0.0
        value = number_or_nan(metrics.get(self._keep.metric))
        return value != value, value if self._keep.mode == "min" else -value

    def _lines(self) -> list[dict[str, Any]]:
        """Return the recorded reports, without those that were repeated after a restart."""
        return read_counted(self._run / "reports.jsonl", "report")

    def _hear(self, rank: int, head: dict[str, Any]) -> None:
        """Receive a rank's report; when all ranks have sent the same one, record it and let the ranks continue."""
        self._heard[rank] = head
        said = {(its["report"], "ended" in its) for its in self._heard.values()}
        if len(said) > 1:
            raise UsageError(f"report: every rank must call it equally often; {self._in_words()}")
        if len(self._heard) < self._gang.size:
            return
        heard, self._heard = self._heard, {}
        if "ended" not in head:
            self._take(head["report"], [heard[rank] for rank in sorted(heard)])
        for each in self._gang.ranks:
            each.send({"do": "heard"})

    def _in_words(self) -> str:
        """Return a text with the last report of each rank."""
        return ", ".join(
            f"rank {rank} has " + ("returned" if "ended" in its else "called it") + f" (report {its['report']})"
            for rank, its in sorted(self._heard.items())
        )

    def _take(self, report: int, messages: list[dict[str, Any]]) -> None:
        """Commit the checkpoint of a report, and record the report; `messages`: those of the ranks, in rank order."""
        checkpoint = self._commit(report, [its["files"] for its in messages])
        line = {"report": report, "metrics": messages[0]["metrics"], "checkpoint": checkpoint and checkpoint.uuid}
        append_line(self._run / "reports.jsonl", {**line, "time": time.time()})
        self.record.reported(report, messages[0]["metrics"])
        if checkpoint:
            self._prune()
            self._resize()

    def _commit(self, report: int, files: list[dict[str, Any] | None]) -> Committed | None:
        """Commit the checkpoint of a report and return it; None if no rank has given files.

        `files`: for each rank, the entries of its files by name, or None. Raises UsageError for a name that two ranks
        have used.
        """
        entries: dict[str, FileEntry] = {}
        for rank, own in enumerate(files):
            if twice := entries.keys() & (own or {}).keys():
                raise UsageError(
                    f"report: rank {rank} and a lower rank both have {', '.join(sorted(twice))} in their part of the "
                    f"checkpoint; use different file names, or let only rank 0 give a checkpoint"
                )
            entries |= {name: FileEntry(**entry) for name, entry in (own or {}).items()}
        if not entries:
            return None
        return Staging(self._checkpoints, uuid_of(report, self._attempt)).commit(report, entries)

    def _prune(self) -> None:
        """Delete the checkpoints that are not to be kept."""
        if self._keep.most is None:
            return
        by_metric = self._keep.metric is not None
        values = {line["report"]: number_or_nan(line["metrics"].get(self._keep.metric)) for line in self._lines()}
        for checkpoint in superfluous(
            committed(self._checkpoints),
            values if by_metric else {},
            smaller_is_better=self._keep.mode == "min",
            best=self._keep.most,
            latest=1 if by_metric else self._keep.most,  # the newest is needed to continue from
        ):
            delete(checkpoint.path, hidden=f".partial-{checkpoint.uuid}")

    def _resize(self) -> None:
        """Raise Resized if the gang can grow, or a node is to be taken away. Called after a checkpoint."""
        # No work is lost now: a restart continues from the checkpoint that was just committed.
        gang, wanted = self._gang, self._wanted
        possible = wanted.possible(gang.nodes)
        leaves = any(rank.node.is_leaving for rank in gang.ranks)
        is_time = time.monotonic() > self._formed_at + RESIZE_S
        if (leaves or (possible > gang.size and is_time)) and possible >= wanted.least:
            raise Resized(f"the gang of {count(gang.size, 'rank')} is formed again with {possible}")
