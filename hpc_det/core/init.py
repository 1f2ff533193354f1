"""The entry of the Core API: the context of a script's training."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from hpc_det.core.core import Core
from hpc_det.core.entry import in_job, stop_signals_outside_job
from hpc_det.core.local_run import local_run
from hpc_det.core.run import Purpose, Run, process_group
from hpc_det.distributed.collectives import Distributed
from hpc_det.distributed.rng import seed_everything
from hpc_det.node.process import SignalPipe
from hpc_det.store.attempt import Attempt


@contextmanager
def init(
    *,
    hparams: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    name: str | None = None,
    loggers: list[dict[str, Any]] | None = None,
    distributed: Distributed | None = None,
) -> Iterator[Core]:
    """Yield the `Core` of this rank, for the length of a `with` block.

    In a job of hpc_det, hyperparameters, configuration and ranks are those of the experiment, and the arguments are
    ignored, except in a point of a Hydra sweep, where they come before those. Outside a job:

    - `hparams` and `config` are the hyperparameters and the configuration, of which any part may be given.
    - `loggers` is like the key of an experiment: [{"wandb": {...}}, {"mlflow": {...}}].
    - The ranks are those of `distributed`, or of torchrun's variables (RANK, WORLD_SIZE, ...).
    - The run is an experiment with one trial, which `hpc-det experiment list` shows. It resumes when the script is
      started again with the same `name`, by default that of the script, unless it had finished. While it runs, a second
      start is a new experiment.
    - A signal (TERM, USR1, USR2, HUP) makes all ranks save and stop at the same batch, and so does
      `hpc-det experiment pause`.

    The random generators of Python, numpy and torch are seeded with the trial's seed on all ranks. An existing process
    group of the script is used and kept.

    Leaving the block saves what is unsaved, and records that the training has finished or was stopped; a job that was
    preempted is requeued. After an exception nothing is saved. SystemExit with code 0 counts as leaving the block.

    Raises UsageError if the script's process group has another rank or size than the variables, and with all problems
    of the arguments, before anything is written.
    """
    here = Attempt.is_in(os.environ)
    leaving = None
    config = {**(config or {}), **({"loggers": loggers} if loggers else {})}
    with in_job(hparams, config) if here else _outside_job(name, hparams or {}, config, distributed) as run:
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


@contextmanager
def _outside_job(
    name: str | None, hparams: dict[str, Any], config: dict[str, Any], distributed: Distributed | None
) -> Iterator[Run]:
    """Yield the run of a script that no job has started, as an experiment with one trial."""
    distributed = distributed or Distributed.from_env(os.environ)
    with (
        closing(SignalPipe(stop_signals_outside_job())) as signals,
        process_group(distributed),
        local_run(name, hparams, config, distributed) as local,
    ):
        seed_everything(local.spec["trial_seed"])
        test = Purpose.from_env(os.environ).test
        with Run.unmanaged(local.spec, local.trial, distributed, signals, test=test, attempt=local.attempt) as run:
            yield run
