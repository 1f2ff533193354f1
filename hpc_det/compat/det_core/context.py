"""det.core.init and det.core.Context (upstream: determined/core/_context.py)."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from hpc_det.compat.cluster_info import ClusterInfo, get_cluster_info
from hpc_det.compat.det_core.checkpoint import CheckpointContext
from hpc_det.compat.det_core.distributed import DistributedContext, DummyDistributedContext
from hpc_det.compat.det_core.preempt import PreemptContext, PreemptMode
from hpc_det.compat.det_core.profiler import ExperimentalCoreContext, ProfilerContext
from hpc_det.compat.det_core.searcher import SearcherContext
from hpc_det.compat.det_core.session import Session
from hpc_det.compat.det_core.train import TensorboardMode, TrainContext
from hpc_det.core.chief import Chief
from hpc_det.core.entry import in_job, outside_job, shared_new_folder
from hpc_det.core.run import Run
from hpc_det.distributed.collectives import Distributed
from hpc_det.distributed.rng import restore_rng, rng_state
from hpc_det.errors import InvalidHP
from hpc_det.store.attempt import Attempt
from hpc_det.store.folders import TrialFolder

logger = logging.getLogger("determined.core")


@dataclass(frozen=True, kw_only=True)
class Outside:
    """A run without an experiment."""

    hparams: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    folder: Callable[[Distributed], TrialFolder] = shared_new_folder
    """Returns the folder of the run, the same on every rank."""
    storage: Path | None = None
    """Where a subfolder for the run's checkpoints is created; None: its own folder."""

    def made(self, distributed: Distributed) -> TrialFolder:
        """Return the folder, with the link to the checkpoints elsewhere. Collective."""
        folder = self.folder(distributed)
        if distributed.is_chief and self.storage and not folder.checkpoints.is_symlink():
            own = self.storage.absolute() / folder.path.name
            own.mkdir(parents=True, exist_ok=True)
            folder.checkpoints.rmdir()
            folder.checkpoints.symlink_to(own)
        distributed.barrier()
        return folder


class Context:
    """The parts of the Core API as attributes. Use it as a context manager: `with det.core.init() as core_context`."""

    def __init__(
        self,
        distributed: DistributedContext,
        preempt_mode: PreemptMode,
        tensorboard_mode: TensorboardMode,
        info: ClusterInfo | None,
        outside: Outside | None,
    ) -> None:
        """`outside`: the run without an experiment; None: this process is a rank of an experiment."""
        self._session = Session(distributed)
        self._outside = outside
        self._tensorboard_mode = tensorboard_mode
        self._block: AbstractContextManager[None] | None = None
        self.info = info
        self.distributed = distributed
        self.train = TrainContext(self._session, tensorboard_mode)
        self.checkpoint = CheckpointContext(self._session)
        self.preempt = PreemptContext(self._session, preempt_mode)
        self.searcher = SearcherContext(self._session)
        self.profiler = ProfilerContext()
        self.experimental = ExperimentalCoreContext()

    def alert(self, title: str | None = None, description: str | None = None, level: str | None = "info") -> None:
        """Print an alert to the log. Raises ValueError without an experiment."""
        if self._outside is not None:
            raise ValueError("alert: this process does not belong to an experiment")
        print(f"hpc-det: alert ({level}): {': '.join(filter(None, [title, description]))}", flush=True)

    def start(self) -> None:
        """Enter the block: connect the ranks. Collective. Raises RuntimeError if this was called before."""
        if self._block is not None:
            raise RuntimeError("det.core.Context: start must be called only once")
        self._block = self._entered()
        self._block.__enter__()

    def close(
        self,
        exc_type: type[BaseException] | None = None,
        exc_val: BaseException | None = None,
        exc_tb: TracebackType | None = None,
    ) -> None:
        """Leave the block. After an exception, the attempt has failed; SystemExit with code 0 is a normal end."""
        block, self._block = self._block, None
        if block is None:
            return
        is_normal = exc_val is None or (isinstance(exc_val, SystemExit) and not exc_val.code)
        block.__exit__(*((None, None, None) if is_normal else (exc_type, exc_val, exc_tb)))

    def __enter__(self) -> Context:
        self.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        self.close(exc_type, exc_val, exc_tb)
        if isinstance(exc_val, InvalidHP):  # it is recorded now
            logger.info("InvalidHP: the trial ends: %s", exc_val)
            sys.exit(0)

    @contextmanager
    def _entered(self) -> Iterator[None]:
        before = rng_state()
        with self._joined() as run:
            restore_rng(before)  # the script decides about its seeds
            session, has_chief = self._session, run.distributed.is_chief
            session.active = run
            self.distributed.bind(run.distributed)
            session.chief = (
                Chief(run, tensorboard=self._tensorboard_mode is TensorboardMode.AUTO) if has_chief else None
            )
            yield
            if session.chief and not session.is_invalid:
                session.chief.finish(stopped=session.acknowledged)
            run.distributed.wait_for_rank_0()
            self.distributed.bind(None)

    def _joined(self) -> AbstractContextManager[Run]:
        outside = self._outside
        if outside is None or self.distributed.size > 1:
            os.environ.update(self.distributed.environment(os.environ))
        if outside is None:
            return in_job()
        return outside_job(dict(outside.hparams), dict(outside.config), None, outside.made)


def init(
    *,
    distributed: DistributedContext | None = None,
    checkpoint_storage: str | dict[str, Any] | None = None,
    preempt_mode: PreemptMode = PreemptMode.WorkersAskChief,
    tensorboard_mode: TensorboardMode = TensorboardMode.AUTO,
) -> Context:
    """Return the context of this process. Every rank calls it, and all training happens in its block.

    `distributed`: this rank's numbers; required with several slots, otherwise ValueError. `checkpoint_storage`: without
    an experiment, a folder for checkpoints; in an experiment it has no effect.

    A process group is created, unless the script has created one before.
    """
    info = get_cluster_info()
    if info is None:
        return Context(
            distributed or DummyDistributedContext(),
            PreemptMode(preempt_mode),
            TensorboardMode(tensorboard_mode),
            None,
            Outside(storage=local_storage(checkpoint_storage)),
        )
    if checkpoint_storage is not None:
        logger.warning("core.init: checkpoint_storage has no effect in an experiment; set it in the experiment file")
    if distributed is None and Attempt.from_env(os.environ).world_size > 1:
        raise ValueError("core.init: with several slots, pass distributed=DistributedContext...(...)")
    return Context(
        distributed or DummyDistributedContext(),
        PreemptMode(preempt_mode),
        TensorboardMode(tensorboard_mode),
        info,
        None,
    )


def local_storage(checkpoint_storage: str | dict[str, Any] | None) -> Path | None:
    """Return the folder that `checkpoint_storage` names; None for None.

    Raises TypeError for another type, and ValueError for storage that is not a folder.
    """
    if checkpoint_storage is None:
        return None
    if isinstance(checkpoint_storage, dict):
        place = checkpoint_storage.get("host_path") or checkpoint_storage.get("container_path")
        below = checkpoint_storage.get("storage_path")
        checkpoint_storage = os.path.join(place, below) if place and below else place or ""
    if not isinstance(checkpoint_storage, str):
        raise TypeError(f"checkpoint_storage: expected a text, a dict or None, got {type(checkpoint_storage).__name__}")
    if not checkpoint_storage or "://" in checkpoint_storage:
        raise ValueError("checkpoint_storage: without an experiment, only a folder is supported; pass its path")
    return Path(checkpoint_storage)
