"""Where a rank trains: its gang, the trial's folder, and how it hears of a stop."""

from __future__ import annotations

import gc
import hashlib
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import Store

from hpc_det.core.checkpoint import CheckpointContext
from hpc_det.core.distributed import Distributed
from hpc_det.core.metrics import MetricsLog
from hpc_det.core.preempt import Listener, StopAgreement, give_notice
from hpc_det.errors import UsageError
from hpc_det.launch.doorbell import Line
from hpc_det.launch.rank import RankProcess
from hpc_det.launch.signals import SignalPipe
from hpc_det.pytorch.context import PyTorchTrialContext
from hpc_det.pytorch.loop import Loop
from hpc_det.pytorch.portable import Portable, keep_code
from hpc_det.pytorch.progress import Progress
from hpc_det.pytorch.schedule import Schedule
from hpc_det.pytorch.shown_log import ShownLog
from hpc_det.pytorch.trial import PyTorchTrial
from hpc_det.store.files import write_json
from hpc_det.store.folders import TrialFolder


@dataclass(frozen=True, kw_only=True)
class Run:
    spec: dict[str, Any]
    """The content of trial.json."""
    folder: TrialFolder
    attempt: int
    distributed: Distributed
    stop: StopAgreement
    listener: Listener
    log: MetricsLog
    code: Path | None
    """What checkpoints take along; None where nobody says what belongs to the trial."""

    @classmethod
    def of_attempt(cls, process: RankProcess, env: Mapping[str, str]) -> Run:
        """A rank that a node agent's launcher has started."""
        attempt = process.attempt
        distributed = Distributed.from_env(env)
        distributed.start()
        if distributed.is_chief:
            keep_code(attempt.trial.experiment().code)
        stop, listener = _hear_stops(distributed, attempt.secret, env, process.signals, process.line)
        return cls(
            spec=json.loads(attempt.trial.trial.read_text(encoding="utf-8")),
            folder=attempt.trial,
            attempt=attempt.number,
            distributed=distributed,
            stop=stop,
            listener=listener,
            log=MetricsLog(attempt.trial, attempt.number),
            code=attempt.trial.experiment().code,
        )

    @classmethod
    def unmanaged(
        cls,
        spec: dict[str, Any],
        folder: TrialFolder,
        distributed: Distributed,
        signals: SignalPipe,
        env: Mapping[str, str],
    ) -> Run:
        """Outside any job: under torchrun or another launcher, or in one process. The gang has started."""
        secret = distributed.broadcast_json(uuid.uuid4().hex)
        stop, listener = _hear_stops(distributed, secret, env, signals, None)
        return cls(
            spec=spec,
            folder=folder,
            attempt=1,
            distributed=distributed,
            stop=stop,
            listener=listener,
            log=ShownLog(folder, 1),
            code=None,
        )

    def new_context(self) -> PyTorchTrialContext:
        return PyTorchTrialContext(self.spec, self.distributed, self.folder.tensorboard)

    def train(
        self,
        trial: PyTorchTrial,
        context: PyTorchTrialContext,
        schedule: Schedule,
        *,
        is_trainer: bool,
        warm_start: Path | None = None,
    ) -> Progress:
        """To its end or to an agreed stop; rank 0 writes the outcome.

        Raises UsageError for a trial that wraps nothing; whatever the trial raises goes through.
        """
        _check_wrapped(type(trial), context)
        loop = Loop(
            trial,
            context,
            schedule,
            stop=self.stop,
            checkpoints=CheckpointContext(self.folder.checkpoints, self.distributed),
            log=self.log,
            portable=Portable(self.spec, type(trial), self.code, is_trainer=is_trainer),
            warm_start=warm_start,
        )
        progress = loop.run()
        if self.distributed.is_chief:
            kind = "stopped" if loop.stopped else "finished"
            write_json(self.folder.outcome, {"attempt": self.attempt, "kind": kind, "steps": progress.steps})
        return progress

    def close(self) -> None:
        """When all is trained. After a failure the process group is left alone: with a dead peer this may hang, and the
        process leaves at once anyway.
        """
        self.distributed.barrier()
        self.listener.close()
        self.stop.close()
        # Objects that hold the process group go first: gloo aborts in their destructors otherwise (pytorch 190489).
        gc.collect()
        self.distributed.stop()


def _hear_stops(
    distributed: Distributed, secret: str, env: Mapping[str, str], signals: SignalPipe, line: Line | None
) -> tuple[StopAgreement, Listener]:
    stores: list[Store] = [distributed.side_store(env) for _ in range(2)] if distributed.size > 1 else []
    waiting, speaking = stores or [distributed.side_store(env)] * 2
    # Whoever reaches the store can read its keys, and the secret seals objects (hpc_det.core.sealed).
    prefix = f"stop/{hashlib.sha256(secret.encode()).hexdigest()}"
    listener = Listener(signals, line, lambda: give_notice(speaking, prefix))
    return StopAgreement(distributed.rank, distributed.size, waiting, prefix), listener


def _check_wrapped(trial_class: type[PyTorchTrial], context: PyTorchTrialContext) -> None:
    problems = [
        f"{trial_class.__name__}: __init__ wraps no {what}; call context.wrap_{what}, or a checkpoint would miss it"
        for what, wrapped in (("model", context.models), ("optimizer", context.optimizers))
        if not wrapped
    ]
    if problems:
        raise UsageError(problems)
