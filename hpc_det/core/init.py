"""The entry of the Core API: the context of a script's training."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from hpc_det.core.core import Core
from hpc_det.core.entry import announce, in_job, outside_job
from hpc_det.distributed.collectives import Distributed
from hpc_det.node.json_files import read_json
from hpc_det.store.attempt import Attempt
from hpc_det.store.experiments import state_root
from hpc_det.store.folders import TrialFolder


@contextmanager
def init(
    *,
    hparams: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    name: str | None = None,
    loggers: list[dict[str, Any]] | None = None,
    distributed: Distributed | None = None,
) -> Iterator[Core]:
    """Yield this rank's view of the training, for the length of a `with` block.

    In a job of hpc_det, hyperparameters and configuration are those of the experiment. In a point of a Hydra sweep, the
    arguments come before them. Elsewhere they are the arguments, and the ranks are those of torchrun's variables (RANK,
    WORLD_SIZE, ...). There, a run resumes when the script is started again with the same `name` (by default the
    script's name), unless it had finished; a signal (TERM, USR1, USR2, HUP) makes all ranks save and stop at the same
    batch.

    `loggers`: like the key `loggers` of an experiment, for a run outside a job: [{"wandb": {...}}, {"mlflow": {...}}].

    The random generators of Python, numpy and torch are seeded with the trial's seed on all ranks. An existing process
    group of the script is used and kept.

    Leaving the block saves what is unsaved and records whether the training has finished or was stopped; then the job
    is requeued. After an exception nothing is saved. SystemExit with code 0 counts as leaving the block.

    Raises UsageError if the script's process group has another rank or size than the variables.
    """
    here = Attempt.is_in(os.environ)
    folder = partial(_local_folder, name or _script_name())
    leaving = None
    config = {**(config or {}), **({"loggers": loggers} if loggers else {})}
    with in_job(hparams, config) if here else outside_job(hparams or {}, config, distributed, folder) as run:
        core = Core(run)
        with core.finishing():
            try:
                yield core
            except SystemExit as error:
                if error.code:
                    raise
                leaving = error
            core.finish()
    if leaving:
        raise leaving


def _script_name() -> str:
    return Path(sys.argv[0]).stem or "notebook"


def _local_folder(name: str, distributed: Distributed) -> TrialFolder:
    """Return the folder of an unfinished local run with this name, or a new one; the same on all ranks."""
    path = None
    if distributed.is_chief:
        path = str(_unfinished(re.sub(r"[^\w.-]+", "-", name)))
        announce(TrialFolder(Path(path)))
    return TrialFolder(Path(distributed.broadcast_json(path)))


def _unfinished(name: str) -> Path:
    parent = state_root(os.environ) / "local"
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    number = 1
    while True:
        folder = TrialFolder(parent / f"{name}-{number}")
        outcome = read_json(folder.outcome) or {}
        if outcome.get("kind") != "finished":
            folder.path.mkdir(mode=0o700, exist_ok=True)
            folder.checkpoints.mkdir(mode=0o700, exist_ok=True)
            return folder.path
        number += 1
