"""Where a script's training runs: as a rank of a job, or outside of one, under torchrun or in one process."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from hpc_det.config.argument_checks import check_arguments
from hpc_det.config.plain_containers import plain_containers
from hpc_det.core.run import Purpose, Run, process_group
from hpc_det.distributed import rank_process
from hpc_det.distributed.collectives import Distributed
from hpc_det.distributed.rank_process import join_gang, note_error
from hpc_det.distributed.rng import seed_everything
from hpc_det.errors import UsageError, count
from hpc_det.node.process import STOP_SIGNALS, SignalPipe
from hpc_det.search.sample import first_sample
from hpc_det.store.attempt import Attempt
from hpc_det.store.experiments import state_root
from hpc_det.store.folders import TrialFolder


def stop_signals_outside_job() -> list[signal.Signals]:
    """Return the signals that stop a run without a job, without those that are ignored, as nohup does with SIGHUP.

    Ctrl-C is not among them, since it must end an interactive run at once.
    """
    return [each for each in STOP_SIGNALS if each != signal.SIGINT and signal.getsignal(each) != signal.SIG_IGN]


@contextmanager
def in_job(hparams: Mapping[str, Any] | None = None, config: Mapping[str, Any] | None = None) -> Iterator[Run]:
    """Yield the run of this rank of a job. An exception in the block is recorded as its failure and raised again.

    `hparams` and `config` count only in a program that runs the user's code, such as a sweep's.
    """
    if rank_process.host:
        with _in_host(rank_process.host, hparams or {}, config or {}) as run:
            yield run
        return
    if "RANK" not in os.environ:
        os.environ.update(_rank_without_launcher(Attempt.from_env(os.environ)))
    process = join_gang(os.environ)
    try:
        with Run.of_attempt(process, os.environ) as run:
            seed_everything(run.spec["trial_seed"])
            yield run
    except BaseException as error:
        note_error(process.attempt, int(os.environ["RANK"]), error)
        raise
    process.report_exit(0)


@contextmanager
def _in_host(host: rank_process.Host, hparams: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[Run]:
    """Yield the run of a rank whose program has joined the gang, and records failures and the exit itself.

    Raises UsageError for invalid loggers in `config`.
    """
    check_arguments(config, {"loggers"})
    with (
        host.handing_stops_over() as is_stopping,
        Run.of_attempt(host.process, os.environ, ended=host.run_ended, is_stopping=is_stopping) as run,
    ):
        # the configuration of a sweep knows hyperparameters only as texts
        run.spec["hparams"] = dict(hparams) or run.spec["hparams"]
        run.spec["config"] = {**run.spec["config"], **config}
        seed_everything(run.spec["trial_seed"])
        yield run


def _rank_without_launcher(attempt: Attempt) -> dict[str, str]:
    """Return torchrun's variables for a script that is the entrypoint, which runs once on each node."""
    if attempt.ranks_per_node > 1:
        error = UsageError(
            f"entrypoint: the script is started once on a node with {count(attempt.ranks_per_node, 'slot')}; start "
            "one for each slot with a launcher: `python3 -m hpc_det.launch.torch_distributed` before the script"
        )
        note_error(attempt, None, error)
        raise error
    return {
        "RANK": str(attempt.node_rank),
        "WORLD_SIZE": str(attempt.nodes),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": attempt.master_addr,
        "MASTER_PORT": str(attempt.master_port),
    }


@contextmanager
def outside_job(
    hparams: dict[str, Any],
    config: dict[str, Any],
    distributed: Distributed | None,
    folder: Callable[[Distributed], TrialFolder],
) -> Iterator[Run]:
    """Yield the run of a script that no job has started. `folder` is called on all ranks, in the process group."""
    distributed = distributed or Distributed.from_env(os.environ)
    with closing(SignalPipe(stop_signals_outside_job())) as signals, process_group(distributed):
        spec = {
            "experiment_id": 0,
            "trial_id": 0,
            "trial_seed": distributed.broadcast_json(_seed(config)),
            "hparams": plain_containers(hparams),
            "config": plain_containers(config),
        }
        seed_everything(spec["trial_seed"])
        test = Purpose.from_env(os.environ).test
        with Run.unmanaged(spec, folder(distributed), distributed, signals, test=test) as run:
            yield run


def _seed(config: Mapping[str, Any]) -> int:
    """Return the trial's seed, 0 to 2**31 - 1, from the experiment's seed or else from that of torch's generator.

    The script may have seeded that generator.
    """
    seed = seed_of(config)
    return seed if seed is not None else torch.initial_seed() % 2**31


def seed_of(config: Mapping[str, Any]) -> int | None:
    """Return the trial's seed for the experiment's seed in `config`; None if it has none."""
    seed = (config.get("reproducibility") or {}).get("experiment_seed")
    return None if seed is None else first_sample({}, seed).seed


def shared_new_folder(distributed: Distributed) -> TrialFolder:
    """Return a new folder for a run without a job, the same on all ranks."""
    path = None
    if distributed.is_chief:
        folder = new_folder()
        announce(folder)
        path = str(folder.path)
    return TrialFolder(Path(distributed.broadcast_json(path)))


def new_folder() -> TrialFolder:
    """Create and return a folder below the state root for a run without a job."""
    parent = state_root(os.environ) / "local"
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = TrialFolder(Path(tempfile.mkdtemp(prefix=datetime.now().strftime("%Y%m%d-%H%M%S-"), dir=parent)))
    folder.checkpoints.mkdir(mode=0o700)
    return folder


def announce(folder: TrialFolder) -> None:
    print(f"hpc-det: checkpoints and metrics are in {folder.path}", flush=True)
