"""One attempt of a trial on one rank: process group, folder, stop notices and the services of the job."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hpc_det.checkpoint.checkpoints import CheckpointContext
from hpc_det.checkpoint.object_store import Mirror, remote_of
from hpc_det.checkpoint.pinned_staging import PinnedStaging
from hpc_det.checkpoint.retention import Policy, policy_of
from hpc_det.checkpoint.save_schedule import SaveSchedule
from hpc_det.config.rank_variables import RESUME_CHECK, THROUGHPUT, TrainsOn, stops_of, trains_on
from hpc_det.core.loader_workers import workers_ignore_stops
from hpc_det.core.loggers import Loggers
from hpc_det.core.portable import keep_code
from hpc_det.core.saver import Checkpointing
from hpc_det.distributed.collectives import Distributed
from hpc_det.distributed.metrics import MetricsLog
from hpc_det.distributed.preempt import ForcedStop, StopAgreement, give_notice
from hpc_det.distributed.rank_process import RankProcess, StopListener
from hpc_det.distributed.searcher import SearcherContext
from hpc_det.errors import UsageError
from hpc_det.node.heartbeat import Progress
from hpc_det.node.json_files import read_json, write_json
from hpc_det.node.lines import Line
from hpc_det.node.process import SignalPipe
from hpc_det.store.attempt import Attempt
from hpc_det.store.folders import TrialFolder
from hpc_det.store.journal import Journal

Outcome = dict[str, Any]
"""Content of outcome.json: attempt, end (see `Run.write_outcome`), batches trained, and whether they are saved."""


@dataclass(frozen=True, kw_only=True)
class JobServices:
    """The services of an experiment's job for its ranks; a run outside a job has none."""

    code: Path | None
    """Folder of the code that checkpoints contain; None if they contain none."""
    searcher: SearcherContext
    retention: Callable[[], Policy]
    """Function that returns the current retention policy of the experiment."""
    mirror: Mirror | None
    """On rank 0: copies checkpoints to the object store; None if the experiment has none, and on other ranks."""
    grace_s: float | None
    """On rank 0: seconds between the notice of a preemption and the kill; None if unknown, and on other ranks."""


@dataclass(frozen=True, kw_only=True)
class Purpose:
    """The kinds of runs that differ from the training that the configuration describes."""

    test: bool = False
    """True if one batch is trained, validated and saved."""
    trains_on: TrainsOn | None = None
    """Input of a short run that measures the throughput; None for other runs."""
    forced_stops: frozenset[int] | None = None
    """Numbers of batches at which `experiment verify-resume` stops the run; None for other runs."""

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Purpose:
        """Return the purpose from the environment, to which `--test` adds HPC_DET_TEST
        (hpc_det.config.request.for_test).
        """
        return cls(
            test=bool(env.get("HPC_DET_TEST")),
            trains_on=trains_on(env.get(THROUGHPUT)),
            forced_stops=stops_of(env.get(RESUME_CHECK)),
        )


@dataclass(frozen=True, kw_only=True)
class Run:
    """One attempt of a trial, as one rank takes part in it."""

    spec: dict[str, Any]
    """Content of trial.json."""
    folder: TrialFolder
    attempt: int
    distributed: Distributed
    stop: StopAgreement
    log: MetricsLog
    job: JobServices | None = None
    """None outside a job."""
    purpose: Purpose = field(default_factory=Purpose)
    ended: Callable[[Outcome], None] | None = None
    """Receives the outcome instead of its file, on every rank; None: rank 0 writes the file."""

    @classmethod
    @contextmanager
    def of_attempt(
        cls,
        process: RankProcess,
        env: Mapping[str, str],
        *,
        ended: Callable[[Outcome], None] | None = None,
        is_stopping: bool = False,
    ) -> Iterator[Run]:
        """Yield the run of a rank that a node agent's launcher started. `is_stopping`: a stop was requested before."""
        attempt, distributed, outside = process.attempt, Distributed.from_env(env), process.heartbeat.progress
        process.heartbeat.progress = lambda: Progress("meeting", 0)
        stop_class = ForcedStop if RESUME_CHECK in env else StopAgreement
        with process_group(distributed), _stops(distributed, process.signals, process.line, stop_class) as stop:
            distributed.barrier()  # fails early on a network that connects ranks but drops data
            process.heartbeat.progress = lambda: stop.progress
            if distributed.is_chief and (code := attempt.trial.experiment().copied_code()):
                keep_code(code)  # before the trial is imported, which may change the folder
            spec = read_json(attempt.trial.trial)
            assert spec is not None  # the worker wrote it before it started the gang
            log = RunLog(attempt.trial, spec, attempt.number, chief=distributed.is_chief, shown=False)
            run = cls(
                spec=spec,
                folder=attempt.trial,
                attempt=attempt.number,
                distributed=distributed,
                stop=stop,
                log=log,
                job=_job_of(attempt, spec["config"], distributed),
                purpose=Purpose.from_env(env),
                ended=ended,
            )
            if is_stopping:
                give_notice(distributed.messages)
            with _ends_as_failed(log):
                yield run
            process.heartbeat.progress = outside

    @classmethod
    @contextmanager
    def unmanaged(
        cls,
        spec: dict[str, Any],
        folder: TrialFolder,
        distributed: Distributed,
        signals: SignalPipe,
        *,
        test: bool,
        attempt: int = 1,
    ) -> Iterator[Run]:
        """Yield a run outside a job, under torchrun or another launcher or in one process. Call it inside
        `process_group`.
        """
        log = RunLog(folder, spec, attempt, chief=distributed.is_chief, shown=True)
        with _stops(distributed, signals, None) as stop, _ends_as_failed(log):
            yield cls(
                spec=spec,
                folder=folder,
                attempt=attempt,
                distributed=distributed,
                stop=stop,
                log=log,
                purpose=Purpose(test=test),
            )

    def checkpointing(
        self, kept: Policy, *, smaller_is_better: bool = True, save_schedule: SaveSchedule | None = None
    ) -> Checkpointing:
        """Return the settings for the checkpoints of this attempt. `kept`: the retention policy outside a job."""
        config, job = self.spec["config"], self.job
        return Checkpointing(
            checkpoints=CheckpointContext(
                self.folder.checkpoints,
                self.distributed,
                job.mirror if job else None,
                may_commit=lambda: Journal(self.folder.journal).insist_on_last(self.attempt),
                copies=PinnedStaging(_staging(config)),
            ),
            save_schedule=save_schedule or self.new_save_schedule(),
            retention=job.retention if job else lambda: kept,
            smaller_is_better=smaller_is_better,
            asynchronous=config.get("asynchronous_checkpoints", True),
        )

    def new_save_schedule(self) -> SaveSchedule:
        auto = self.spec["config"].get("checkpoint_interval") == "auto"
        return SaveSchedule(self.folder, self.distributed, auto=auto, grace_s=self.job.grace_s if self.job else None)

    def write_outcome(self, end: str, steps: int, *, saved: bool) -> Outcome:
        """Return the outcome of this attempt, which rank 0 writes. `end`: "stopped", "waiting" or "finished"."""
        outcome = {"attempt": self.attempt, "kind": end, "steps": steps, "saved": saved}
        if self.ended:
            self.ended(outcome)
        elif self.distributed.is_chief:
            write_json(self.folder.outcome, outcome)
        if self.distributed.is_chief:
            self.log.end(end, self.stop.deadline)
        return outcome


def _job_of(attempt: Attempt, config: dict[str, Any], distributed: Distributed) -> JobServices:
    trial = attempt.trial
    plan = read_json(trial.experiment().plan) if distributed.is_chief else None
    return JobServices(
        code=trial.experiment().copied_code(),
        searcher=SearcherContext(trial, attempt.worker, distributed),
        retention=partial(policy_of, trial),
        mirror=_mirror(trial, config) if distributed.is_chief else None,
        grace_s=plan and plan.get("grace_time_s"),
    )


@contextmanager
def process_group(distributed: Distributed) -> Iterator[None]:
    """Join the ranks of `distributed` in a process group for the length of the block, unless the script has made one.

    A script's own group is used and kept. After a failure the group is not destroyed: with a dead peer that may hang,
    and the process exits anyway. Raises UsageError if a script's group has another rank or size.
    """
    is_ours = not dist.is_initialized()
    if not is_ours:
        _check_group(distributed)
    distributed.start()
    yield
    # Objects that hold the process group go first: gloo aborts in their destructors otherwise (pytorch 190489).
    gc.collect()
    distributed.leave()
    if is_ours:
        distributed.stop()


def _check_group(distributed: Distributed) -> None:
    theirs, ours = (dist.get_rank(), dist.get_world_size()), (distributed.rank, distributed.size)
    if theirs != ours:
        raise UsageError(
            f"the existing process group has rank {theirs[0]} of {theirs[1]}, but RANK and WORLD_SIZE mean "
            f"rank {ours[0]} of {ours[1]}; set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE as torchrun does"
        )


def _staging(config: dict[str, Any]) -> Path | None:
    """Return the folder on the node's disk for copies of the saved objects; None if it is not configured.

    Raises UsageError if this job cannot write there.
    """
    configured = config.get("checkpoint_staging")
    if configured is None:
        return None
    folder = Path(os.path.expandvars(configured))
    if not (folder.is_absolute() and os.access(folder, os.W_OK | os.X_OK)):
        raise UsageError(
            f"checkpoint_staging: {configured!r} is {str(folder)!r} on {socket.gethostname()}, where this job cannot "
            f"write; name a folder on a local disk that every node of the pool has, or remove the key"
        )
    return folder


def _mirror(trial: TrialFolder, config: dict[str, Any]) -> Mirror | None:
    remote = remote_of(trial, config["checkpoint_storage"])
    return Mirror(remote, trial.checkpoints) if remote else None


@contextmanager
def _stops(
    distributed: Distributed, signals: SignalPipe, line: Line | None, stop_class: type[StopAgreement] = StopAgreement
) -> Iterator[StopAgreement]:
    """Yield the agreement of the ranks to stop, which a signal or a message of the agent starts."""
    stop = stop_class(distributed.messages)

    def notice(deadline: float | None) -> None:
        stop.deadline = deadline
        give_notice(distributed.messages)

    listener = StopListener(signals, line, notice)
    try:
        with workers_ignore_stops():
            yield stop
        distributed.barrier()
    finally:
        listener.close()
        stop.close()


class RunLog(MetricsLog):
    """A metrics log that also sends everything to the loggers of the configuration. Rank 0 alone writes to it."""

    def __init__(self, folder: TrialFolder, spec: Mapping[str, Any], attempt: int, *, chief: bool, shown: bool) -> None:
        """`shown`: print the metrics, too, for runs without a follower."""
        super().__init__(folder, attempt)
        self._loggers = Loggers.of(spec["config"].get("loggers"), folder, spec, attempt) if chief else Loggers()
        self._shown = shown

    def begin_at(self, *, trained: int, validated: int) -> None:
        super().begin_at(trained=trained, validated=validated)
        self._loggers.begin(trained)

    def report_all(self, records: Sequence[Mapping[str, Any]]) -> None:
        super().report_all(records)
        for record in records:
            self._loggers.report(record["kind"], record["steps"], record["metrics"])
        if self._shown:
            last = records[-1]  # of many, since a loop may report at every batch
            values = ", ".join(f"{name} {_short(value)}" for name, value in last["metrics"].items())
            of = f" of {last['total']}" if last["total"] else ""
            with suppress(OSError):  # whoever reads the output may have stopped, as in `python train.py | head`
                print(f"hpc-det: {last['kind']} at batch {last['steps']}{of}: {values}", flush=True)

    def report_group(self, group: str, steps: int, metrics: Mapping[str, Any]) -> None:
        super().report_group(group, steps, metrics)
        self._loggers.report(group, steps, metrics)

    def saved(self, steps: int, checkpoint: Path) -> None:
        self._loggers.checkpoint(steps, checkpoint)

    def end(self, kind: str, deadline: float | None = None) -> None:
        """Send the rest to the loggers. `kind`: the end of the outcome, or "failed"; further calls do nothing."""
        self._loggers.end(kind, deadline)


@contextmanager
def _ends_as_failed(log: MetricsLog) -> Iterator[None]:
    try:
        yield
    except BaseException:
        log.end("failed")
        raise


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
