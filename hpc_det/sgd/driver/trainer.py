"""RaySGD's TorchTrainer: the driver of a training whose ranks may die, go and come.

Arguments, methods and results are those of ray.util.sgd.torch.TorchTrainer in Ray 1.8; docs/sgd.md tells where this one
differs.
"""

from __future__ import annotations

import atexit
import inspect
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from hpc_det.errors import HpcDetError, UsageError
from hpc_det.sgd.capacity import Capacity, capacity_of
from hpc_det.sgd.driver.calls import Call, reduce
from hpc_det.sgd.driver.elastic import ElasticGang
from hpc_det.sgd.driver.nodes import Patience
from hpc_det.sgd.driver.opening import check, on_devices, opened, wanted_of
from hpc_det.sgd.operator.options import BATCH_SIZE
from hpc_det.sgd.operator.training_operator import TrainingOperator
from hpc_det.sgd.rank import RankSettings
from hpc_det.sgd.rank.state import read_state, write_state
from hpc_det.store.run_folder import run_of

_log = logging.getLogger("hpc_det.sgd")


class TrainerIsShutDown(HpcDetError, RuntimeError):
    """RaySGD raises RuntimeError."""


class TorchTrainer:
    """Blocks until the ranks are there. Arguments beyond RaySGD's:

    executor: where the ranks run: "local", "allocation" (the job that this process is in), "slurm" or "pbs" (a job of
        their own), or one of hpc_det.sgd.capacity; None: the allocation inside a job, else this machine.
    min_workers: with fewer ranks the training waits; `num_workers` is the most.
    run: a name below $HPC_DET_ROOT/sgd, or a path with a slash: where snapshots are kept and a driver that starts again
        goes on. None: inside a job one of that job, else a temporary one, which goes with the trainer.
    heartbeat_timeout_s: seconds without a message after which a node counts as lost.
    startup_timeout_s: seconds to wait for ranks.
    hang_timeout_s: seconds without a finished batch, or within `setup` or another call, after which the gang counts as
        hung (None: 20 times the longest batch so far, at least 600 s; elsewhere 4 h after another rank has finished).

    Raises BadArgument (a ValueError) with every mistake, NotEnoughRanks (a TimeoutError), and what a user's `setup`
    raises. Nothing is left behind then.
    """

    def __init__(
        self,
        *,
        training_operator_cls: type[TrainingOperator],
        initialization_hook: Callable[[], None] | None = None,
        config: dict[str, Any] | None = None,
        num_workers: int = 1,
        num_cpus_per_worker: int = 1,
        use_gpu: bool | Literal["auto"] = "auto",
        backend: str = "auto",
        wrap_ddp: bool = True,
        timeout_s: float = 1800.0,
        use_fp16: bool | Literal["apex"] = False,
        use_tqdm: bool = False,
        add_dist_sampler: bool = True,
        scheduler_step_freq: Literal["batch", "epoch", "manual"] | None = None,
        use_local: bool = False,
        executor: str | Capacity | None = None,
        min_workers: int = 1,
        run: str | os.PathLike[str] | None = None,
        heartbeat_timeout_s: float = 10.0,
        startup_timeout_s: float | None = None,
        hang_timeout_s: int | None = None,
        serialize_data_creation: bool | None = None,
        **others: Any,
    ) -> None:
        self.config = {} if config is None else config
        check(
            {
                "training_operator_cls": training_operator_cls,
                "config": self.config,
                "num_workers": num_workers,
                "min_workers": min_workers,
                "num_cpus_per_worker": num_cpus_per_worker,
                "use_gpu": use_gpu,
                "backend": backend,
                "use_fp16": use_fp16,
                "use_tqdm": use_tqdm,
                "scheduler_step_freq": scheduler_step_freq,
            },
            others,
            [name for name in inspect.signature(TorchTrainer).parameters if name != "others"],
        )
        if serialize_data_creation:
            _log.warning("serialize_data_creation has no effect; lock what your setup() downloads")
        capacity = capacity_of(executor, num_workers=num_workers, cpus_per_worker=num_cpus_per_worker, use_gpu=use_gpu)
        self._settings = RankSettings(
            operator_cls=training_operator_cls,
            config=self.config,
            num_workers=num_workers,
            use_fp16=use_fp16,
            use_tqdm=use_tqdm,
            wrap_ddp=wrap_ddp,
            add_dist_sampler=add_dist_sampler,
            scheduler_step_freq=scheduler_step_freq,
            **on_devices(capacity, use_gpu=use_gpu, timeout_s=timeout_s, backend=backend),
        )
        wanted = wanted_of(
            capacity,
            num_workers=num_workers,
            min_workers=min_workers,
            settings=self._settings_for,
            hook=initialization_hook,
            is_here=use_local,
        )
        patience = Patience(
            heartbeat_timeout_s=heartbeat_timeout_s,
            startup_timeout_s=startup_timeout_s,
            hang_timeout_s=hang_timeout_s,
        )
        self._train_calls = 0
        """By this program. The number of the state may be no greater after one: the state before it may be lost."""
        self._run = run_of(run, os.environ)
        self._run.goes_with_driver()
        is_durable = not self._run.is_temporary or capacity.has_queue
        self._gang: ElasticGang | None = opened(self._run, capacity, patience, wanted, is_durable=is_durable)
        _alive.add(self)

    @property
    def epochs_done(self) -> int:
        """Whole passes over the training data, by whatever driver of this run."""
        gang = self._open_gang
        return gang.rounds.epochs_done(gang.epochs_done)

    @property
    def logs(self) -> Path:
        """What ranks print stands there, in generation-G/rank-R.log; G is 1 until a rank dies or comes."""
        return self._run.folder.logs

    def remaining(self, epochs: int) -> Iterator[int]:
        """Yield the numbers of the epochs that are still to be trained, from 0; call `train()` at least once in each.

        After a restart the first one is the epoch in which the earlier program of this run ended: the calls that it had
        completed there return their recorded results. Raises UsageError for an epoch without a call of `train()`.
        """
        rounds = self._open_gang.rounds
        while (epoch := rounds.next_epoch(self.epochs_done)) < epochs:
            calls = self._train_calls
            with rounds.opened(epoch):
                yield epoch
            if self._train_calls == calls:
                raise UsageError("trainer.remaining: train() was not called in this round; it would go on for ever")

    def train(
        self,
        num_steps: int | None = None,
        profile: bool = False,
        reduce_results: bool = True,
        max_retries: int = 3,
        info: dict[str, Any] | None = None,
    ) -> Any:
        """One pass over the training data, or the next `num_steps` batches of each rank: results reduced over ranks, or
        a list in rank order. What a rank raises is raised here; ranks that die are tried again `max_retries` times.
        """
        assert max_retries >= 0, f"max_retries is {max_retries}; it has to be at least 0"
        self._train_calls += 1
        arguments = {"num_steps": num_steps, "profile": profile, "info": info}
        return self._open_gang.train(Call("train", arguments, _then(reduce_results)), max_retries)

    def validate(
        self,
        num_steps: int | None = None,
        profile: bool = False,
        reduce_results: bool = True,
        info: dict[str, Any] | None = None,
    ) -> Any:
        """The same over the validation data."""
        arguments = {"num_steps": num_steps, "profile": profile, "info": info}
        return self._open_gang.change(Call("validate", arguments, _then(reduce_results)))

    def apply_all_workers(self, fn: Callable[[], Any]) -> list[Any]:
        """`fn()` on each rank: results in rank order."""
        results: list[Any] = self._open_gang.change(Call("apply", {"function": fn}))
        return results

    def apply_all_operators(self, fn: Callable[[TrainingOperator], Any]) -> list[Any]:
        """`fn(operator)` on each rank: results in rank order."""
        results: list[Any] = self._open_gang.change(Call("apply_operator", {"function": fn}))
        return results

    def update_scheduler(self, metric: float) -> None:
        """`step(metric)` on every registered scheduler."""
        self._open_gang.change(Call("update_scheduler", {"metric": metric}))

    def get_model(self, to_cpu: bool = False) -> nn.Module | list[nn.Module]:
        """A copy of the trained model, or models, on this process's GPU if it has one."""
        models = self._open_gang.ask("models", to_cpu=True)
        if not to_cpu and self._settings.use_gpu and torch.cuda.is_available():
            models = [model.cuda() for model in models]
        self._open_gang.note_read()
        return models[0] if len(models) == 1 else list(models)

    def get_local_operator(self) -> TrainingOperator:
        """Rank 0's, which lives in this process. Raises NotImplementedError without `use_local`."""
        operator = self._open_gang.local_operator
        if operator is None:
            raise NotImplementedError("get_local_operator needs TorchTrainer(use_local=True)")
        return operator

    def state_dict(self) -> dict[str, Any]:
        """Rank 0's, with tensors on the CPU."""
        state: dict[str, Any] = self._open_gang.ask("state_dict")
        self._open_gang.note_read()
        return state

    def load_state_dict(self, state_dict: dict[str, Any], blocking: bool = True) -> None:
        """Into all ranks. It always blocks: an error would be lost otherwise."""
        self._open_gang.load(state_dict)

    def save(self, path: str | os.PathLike[str]) -> str | os.PathLike[str]:
        """`state_dict()` as a file of torch.save, replaced in one step."""
        write_state(self._open_gang.ask("state_dict"), Path(path))
        self._open_gang.note_read()
        return path

    def load(self, path: str | os.PathLike[str], weights_only: bool = True) -> None:
        """What `save` wrote. `weights_only=False` runs whatever code the file says: only for files that you trust."""
        self.load_state_dict(read_state(Path(path), weights_only))

    def restore(self, *args: Any) -> None:
        raise DeprecationWarning("restore is load now")

    def shutdown(self, force: bool = False) -> None:
        """End all ranks, agents and jobs. `force`: without waiting for the ranks to exit by themselves.

        If a Ctrl-C interrupts it, the rest is done when the program exits. Without a `run`: if an exception follows
        training that was neither saved nor read, the newest snapshot is kept on disk; a warning names its folder.
        """
        self._end(force, after_error=isinstance(sys.exc_info()[1], Exception))

    def _end(self, force: bool, *, after_error: bool) -> None:
        gang = self._gang
        if gang is None:
            return
        try:
            if self._run.is_temporary and gang.has_unread_training and (gang.has_failed or after_error):
                self._keep(gang)
        finally:
            gang.stop(force)
            self._gang = None
            self._run.remove_if_temporary()

    def _keep(self, gang: ElasticGang) -> None:
        try:
            is_kept = gang.keep()
        except OSError as error:
            _log.warning("the newest snapshot could not be kept: %s", error)
            return
        if is_kept:
            self._run = self._run.kept()
            _log.warning(
                "an exception came after train() call %d, and nothing was saved since; the newest snapshot is kept: "
                "TorchTrainer(run=%r) goes on from it; remove that folder when you do not need it",
                gang.calls,
                str(self._run.folder.path),
            )

    @classmethod
    def as_trainable(cls, *args: Any, override_tune_step: Callable[..., Any] | None = None, **kwargs: Any) -> type:
        """A class for `tune_run` that makes one trainer with these arguments for each trial."""
        from hpc_det.sgd.tune.trainable import trainable_of

        return trainable_of(cls, *args, override_tune_step=override_tune_step, **kwargs)

    def __enter__(self) -> TorchTrainer:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown(force=error[0] is not None)

    @property
    def _open_gang(self) -> ElasticGang:
        if self._gang is None:
            raise TrainerIsShutDown("this trainer was shut down; make another one")
        return self._gang

    def _settings_for(self, size: int) -> RankSettings:
        """The rank's share of the batch is always that of the size which was asked for: no rounding adds up."""
        config = dict(self.config)
        if BATCH_SIZE in config:
            if config[BATCH_SIZE] % size:
                share = config[BATCH_SIZE] // size
                _log.warning(
                    "a batch of %d on %d ranks is %d each, %d in all", config[BATCH_SIZE], size, share, share * size
                )
            config[BATCH_SIZE] //= size
        return replace(self._settings, config=config)


def _then(reduce_results: bool) -> Callable[[list[Any]], Any]:
    return reduce if reduce_results else list


_alive: weakref.WeakSet[TorchTrainer] = weakref.WeakSet()


@atexit.register
def _shut_down_all() -> None:
    """A driver that ends without `shutdown`, by an exception or by Ctrl-C, leaves nothing behind either."""
    after_error = isinstance(getattr(sys, "last_value", None), Exception)  # no Ctrl-C, and no sys.exit
    for trainer in list(_alive):
        trainer._end(force=True, after_error=after_error)
