"""`determined.experimental.core_v2`: the Core API as module globals, also for runs without an experiment.

Without an experiment, a run with the same two external ids continues, and `info.latest_checkpoint` is its newest
checkpoint. Its files are in the folder $HPC_DET_ROOT/local/EXPERIMENT-TRIAL.
"""

from __future__ import annotations

import atexit
import os
import re
import socket
import zlib
from dataclasses import asdict, dataclass
from typing import Any

from hpc_det.compat.cluster_info import ClusterInfo, TrialInfo, get_cluster_info
from hpc_det.compat.det_core import (
    CheckpointContext,
    Context,
    DistributedContext,
    DummyDistributedContext,
    PreemptContext,
    PreemptMode,
    SearcherContext,
    TensorboardMode,
    TrainContext,
)
from hpc_det.compat.det_core import init as core_init
from hpc_det.compat.det_core.context import Outside, local_storage
from hpc_det.core.entry import shared_new_folder
from hpc_det.distributed.collectives import Distributed
from hpc_det.launch.determined_variables import newest_checkpoint
from hpc_det.node.files import make_folders
from hpc_det.node.program_end import note_exit, uncaught
from hpc_det.store.experiments import state_root
from hpc_det.store.folders import TrialFolder

train: TrainContext | None = None
checkpoint: CheckpointContext | None = None
distributed: DistributedContext | None = None
preempt: PreemptContext | None = None
searcher: SearcherContext | None = None
info: ClusterInfo | None = None

_PARTS = ("train", "checkpoint", "distributed", "preempt", "searcher", "info")
_context: Context | None = None
_earlier_errors: tuple[BaseException, ...] = ()
"""Exceptions that were raised or caught before `init`."""


@dataclass
class Config:
    """A run without an experiment; in an experiment it is ignored. `workspace` and `project` have no effect."""

    name: str | None = None
    hparams: dict[str, Any] | None = None
    data: dict[str, Any] | None = None
    description: str | None = None
    labels: list[str] | None = None
    workspace: str | None = None
    project: str | None = None
    checkpoint_storage: str | dict[str, Any] | None = None
    searcher: dict[str, Any] | None = None
    external_experiment_id: str | None = None
    external_trial_id: str | None = None

    @property
    def run_name(self) -> str | None:
        """The name of the folder of a run that can be continued; None for a run without external ids.

        Raises ValueError for a trial without an experiment.
        """
        ids = self.external_experiment_id, self.external_trial_id
        if ids[1] is not None and ids[0] is None:
            raise ValueError("core_v2.Config: external_trial_id needs external_experiment_id")
        if None in ids:
            return None
        readable = "-".join(re.sub(r"[^\w.-]+", "-", str(each)) for each in ids)
        return f"{readable}-{zlib.crc32(repr(ids).encode()):08x}"  # two pairs of ids may look alike


class DefaultConfig(Config):
    """The former name of a part of Config."""


class UnmanagedConfig(Config):
    """The former name of a part of Config."""


def init_context(
    *,
    config: Config | None = None,
    defaults: Config | None = None,
    unmanaged: Config | None = None,
    client: object = None,
    **options: Any,
) -> Context:
    """Return a context, as `core.init` does, which describes the other arguments.

    `defaults` and `unmanaged`: former parts of `config`. `client` is ignored. Raises ValueError without an experiment
    and a configuration.
    """
    if get_cluster_info() is not None:
        return core_init(**options)
    merged = _merged(config, defaults, unmanaged)
    if merged is None:
        raise ValueError("core_v2.init: pass config=core_v2.Config(...), or run the script as an experiment")
    return _unmanaged(merged, **options)


def init(**options: Any) -> None:
    """Enter a context, and fill the module's globals with its parts. Arguments: see `init_context`."""
    global _context, _earlier_errors
    close()
    _context = init_context(**options)
    _context.start()
    globals().update({name: getattr(_context, name) for name in _PARTS})
    _earlier_errors = uncaught()
    note_exit()
    atexit.unregister(close)
    atexit.register(close)


def close() -> None:
    """Leave the context. This is called at the exit of the process, too."""
    global _context
    context, _context = _context, None
    globals().update(dict.fromkeys(_PARTS))
    if context is not None:
        errors = uncaught(but=_earlier_errors)
        error = next((each for each in errors if not isinstance(each, SystemExit) or each.code), None)
        context.close(type(error) if error else None, error, None)


def url_reverse_webui_exp_view() -> str:
    """Return the folder of the run; there is no web interface."""
    assert _context is not None, "call core_v2.init first"
    return str(_context._session.run.folder.path)


def _merged(config: Config | None, defaults: Config | None, unmanaged: Config | None) -> Config | None:
    if config is not None or defaults is None:
        return config
    parts = [vars(each) for each in (unmanaged, defaults) if each]
    return Config(**{name: value for part in parts for name, value in part.items() if value is not None})


def _unmanaged(
    config: Config,
    *,
    distributed: DistributedContext | None = None,
    checkpoint_storage: str | dict[str, Any] | None = None,
    preempt_mode: PreemptMode = PreemptMode.WorkersAskChief,
    tensorboard_mode: TensorboardMode = TensorboardMode.AUTO,
) -> Context:
    name, hparams = config.run_name, config.hparams or {}
    run = TrialFolder(state_root(os.environ) / "local" / name) if name else None
    content = {
        key: value
        for key, value in asdict(config).items()
        if value is not None and key in ("name", "data", "description", "labels", "searcher")
    }

    def folder(ranks: Distributed) -> TrialFolder:
        if run is None:
            return shared_new_folder(ranks)
        make_folders(run.checkpoints)
        return run

    outside = Outside(
        hparams=hparams,
        config=content,
        folder=folder,
        storage=local_storage(checkpoint_storage or config.checkpoint_storage),
    )
    context = distributed or DummyDistributedContext()
    newest = newest_checkpoint(run.checkpoints) if run else None
    about = _info(config, content, newest.uuid if newest else None, context)
    return Context(context, PreemptMode(preempt_mode), TensorboardMode(tensorboard_mode), about, outside)


def _info(config: Config, content: dict[str, Any], latest: str | None, ranks: DistributedContext) -> ClusterInfo:
    """Return the facts about a run without an experiment. Its numbers are derived from the external ids."""
    number = zlib.crc32((config.run_name or "").encode())
    return ClusterInfo(
        trial=TrialInfo(trial_id=number, experiment_id=0, trial_seed=0, hparams=config.hparams or {}, _config=content),
        latest_checkpoint=latest,
        slot_ids=[*range(ranks.local_size)],
        container_rank=ranks.cross_rank,
        user_data=config.data or {},
        container_addrs=["127.0.0.1"] * ranks.cross_size,
        container_slot_counts=[ranks.local_size] * ranks.cross_size,
        agent_id=socket.gethostname(),
        allocation_id=config.run_name or "",
    )
