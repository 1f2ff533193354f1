"""RaySGD's TorchTrainer: the driver of a training whose gang may lose and gain ranks.

Arguments, methods and results are those of ray.util.sgd.torch.TorchTrainer in Ray 1.8;
docs/how-to/port-from-raysgd.md lists the differences.
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

from hpc_det.errors import HpcDetError, UsageError, shown
from hpc_det.node.program_end import note_exit, uncaught
from hpc_det.plan.local_experiment import SEARCHER, GangSize
from hpc_det.sgd.capacity import Capacity, capacity_of
from hpc_det.sgd.driver.calls import Call, reduce
from hpc_det.sgd.driver.elastic import ElasticGang
from hpc_det.sgd.driver.experiment import Description, named
from hpc_det.sgd.driver.failures import was_terminated
from hpc_det.sgd.driver.nodes import Patience
from hpc_det.sgd.driver.opening import check, on_devices, opened, wanted_of
from hpc_det.sgd.operator.options import BATCH_SIZE, BadArgument
from hpc_det.sgd.operator.training_operator import TrainingOperator
from hpc_det.sgd.rank import RankSettings
from hpc_det.sgd.rank.state import read_state, write_state
from hpc_det.store.run_folder import run_of

_log = logging.getLogger("hpc_det.sgd")


class TrainerIsShutDown(HpcDetError, RuntimeError):
    """A method was called after `shutdown`. Also a RuntimeError, which RaySGD raises."""


class TorchTrainer:
    """The driver of a gang of ranks that train a TrainingOperator.

    The constructor blocks until the gang is formed. When ranks die or nodes are taken away, the gang is formed again
    from the newest snapshot, and the interrupted call is repeated. A trainer is also a context manager, which calls
    `shutdown` at its end.

    Args:
        training_operator_cls: The user's subclass of TrainingOperator; each rank creates one instance.
        initialization_hook: A function without arguments that every rank calls first, before the process group
            exists, for example to set environment variables. None: no hook.
        config: The user's config, a dict that is passed to `setup` on each rank. `config[BATCH_SIZE]`, if given, is
            the batch size in samples over all ranks; each rank receives its share. None: an empty dict.
        num_workers: The largest number of ranks.
        num_cpus_per_worker: CPUs that a rank takes on a node without GPUs.
        use_gpu: Whether each rank takes a GPU. "auto": if the nodes have GPUs.
        backend: "nccl", "gloo", or "auto" (nccl with GPUs, else gloo).
        wrap_ddp: Whether `register` wraps models in DistributedDataParallel.
        timeout_s: Seconds after which a collective fails. With GPUs the environment variable NCCL_TIMEOUT_S, if set,
            overrides it.
        use_fp16: True for torch's mixed precision, "apex" for NVIDIA's apex, False for float32.
        use_tqdm: Whether rank 0 shows a progress bar; needs the package tqdm.
        add_dist_sampler: Whether DataLoaders are sharded over the ranks.
        scheduler_step_freq: When the default loop steps the scheduler: after each "batch", after each "epoch" (call of
            `train`), or only by `update_scheduler` ("manual"). None: no schedulers may be registered.
        use_local: Whether rank 0 runs in this process, for debugging.
        executor: Where the ranks run: "local" (this machine), "allocation" (the job that this process is in), "slurm",
            "pbs" or the name of another cluster profile (a job is submitted for them), an executor of submitit, or a
            capacity of hpc_det.sgd.capacity. None: the allocation if this process is in a job with other hosts, else
            this machine.
        min_workers: The smallest number of ranks; with fewer the training waits for more.
        run: A name below $HPC_DET_ROOT/sgd, or a path with a slash: the run folder, in which snapshots are kept and
            from which a restarted program continues. None: in a job the run of that job, else a temporary run that
            `shutdown` removes.
        heartbeat_timeout_s: Seconds without a message after which a node counts as lost.
        startup_timeout_s: Seconds to wait for `min_workers` ranks. None: 100 s, or without limit if the ranks' jobs
            wait in a queue.
        hang_timeout_s: Seconds without a finished batch, or in `setup` or another call, after which the gang counts as
            hung. None: 20 times the longest batch until then, at least 600 s, and at least 1 hour for the first batch
            of a call; in `setup` and other calls, 4 hours after another rank has finished them.
        serialize_data_creation: An argument of RaySGD without effect; it only logs a warning.
        **others: Arguments of earlier RaySGD releases, and misspelled ones, which raise BadArgument.

    Attributes:
        config: The user's config. Changes have effect when the gang is formed the next time.

    Raises:
        BadArgument: A ValueError that lists all invalid arguments. For arguments of earlier RaySGD releases it is also
            a DeprecationWarning.
        UsageError: `executor` cannot be used, or another program uses the run.
        NotEnoughRanks: A TimeoutError; fewer than `min_workers` ranks started in time.
        RetriesUsedUp: A RuntimeError; no gang could be formed.
        Exception: Any exception that the user's `setup` or `initialization_hook` raises on a rank.
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
        """Number of `train` calls of this program. `ElasticGang.calls` may decrease, when the newest state is lost."""
        self._run = run_of(run, os.environ)
        self._run.goes_with_driver()  # a temporary run is removed even if this process is killed
        # With a queue, all nodes may be taken away before others start: only the disk holds the state meanwhile.
        is_durable = not self._run.is_temporary or capacity.has_queue
        about = Description(
            name=named(run),
            hparams=self.config,
            sections={"searcher": {**SEARCHER, "metric": "val_loss", "max_length": None}},
            size=GangSize(nodes=1, ranks_per_node=wanted.most, has_gpus=self._settings.use_gpu),
        )
        self._gang: ElasticGang | None = opened(self._run, capacity, patience, wanted, about, is_durable=is_durable)
        self._logs = self._run.folder.logs
        self._earlier_errors = uncaught()
        """Exceptions that were raised or caught before the last use of this trainer."""
        note_exit()
        _alive.add(self)

    @property
    def epochs_done(self) -> int:
        """The number of completed passes over the training data, including those of earlier programs of this run."""
        gang = self._open_gang
        return gang.rounds.epochs_done(gang.epochs_done)

    @property
    def logs(self) -> Path:
        """The folder of the ranks' logs, attempt-A/rank-R.log, where A counts the gangs of the run from 1.

        It remains when a temporary run ends, until the experiment of the run is deleted.
        """
        return self._logs

    def remaining(self, epochs: int) -> Iterator[int]:
        """Yield the numbers of the epochs that are still to be trained.

        After a restart of the program, the first number is the epoch in which the earlier program ended. The calls that
        the earlier program had completed in that epoch are not made again, but return their recorded results.

        Args:
            epochs: The number of epochs of the whole training; the numbers are below it, from 0.

        Raises:
            UsageError: `train()` was not called in an epoch, so that the loop would never end.
        """
        rounds = self._open_gang.rounds
        while (epoch := rounds.next_epoch(self.epochs_done)) < epochs:
            calls = self._train_calls
            with rounds.opened(epoch):
                yield epoch
            if self._train_calls == calls:
                raise UsageError(
                    "trainer.remaining: train() was not called in this round, so the loop would never end; call it at "
                    "least once in each round"
                )

    def train(
        self,
        num_steps: int | None = None,
        profile: bool = False,
        reduce_results: bool = True,
        max_retries: int = 3,
        info: dict[str, Any] | None = None,
        dataset: None = None,
    ) -> Any:
        """Train on the rest of the current pass over the training data, or on the next `num_steps` batches.

        At the end of a pass the next call begins a new one. If ranks are lost, the whole call is repeated from the
        state before it.

        Args:
            num_steps: Number of batches of each rank; a new pass begins as often as needed. None: to the end of the
                pass.
            profile: Whether to measure the parts of each step; the result then has the key `profile` with mean
                durations in seconds. Training is slower because each part waits for the GPU.
            reduce_results: Whether to return one dict instead of a list with one dict per rank.
            max_retries: How often the call is repeated after a failure of a rank, a node or the network. Nodes that
                the scheduler takes away do not count.
            info: Passed to `train_epoch` and, as part of `batch_info`, to `train_batch`. Its key `num_epochs` is shown
                in the progress bar.
            dataset: An argument of RaySGD for a Ray dataset. Any value but None raises BadArgument.

        Returns:
            The result of `train_epoch`: by default `epoch` (passes begun, from 1), `batch_count`, `num_samples`, and
            for each metric m its mean over samples, `m`, and its value for the last batch, `last_m`. Reduced over
            ranks, `num_samples` is the sum, other numbers are the unweighted mean of the ranks' values without NaN,
            and anything else is rank 0's. With `reduce_results=False`, a list of the ranks' results in rank order.

        Raises:
            AssertionError: `max_retries` is negative.
            BadArgument: A `dataset` is given.
            MissingLoader: `setup` has registered no train_loader. A RuntimeError and a ValueError.
            RetriesUsedUp: A RuntimeError; the call failed more than `max_retries` times.
            NotEnoughRanks: A TimeoutError; fewer than `min_workers` ranks were available in time.
            StateLost: A RuntimeError; all nodes that held the newest state are lost, and no snapshot is on disk.
            TrainerIsShutDown: A RuntimeError; `shutdown` was called before.
            JobLeaves: A SystemExit with code 75; the scheduler takes all nodes of the job, and the state is saved.
            Exception: Any exception that the user's code raises on a rank. It is not retried.
        """
        assert max_retries >= 0, f"max_retries is {max_retries}; it must be at least 0"
        if dataset is not None:
            raise BadArgument(
                f"dataset is {shown(dataset)}; Ray datasets are not available: give register_data a DataLoader in "
                f"setup(), which is sharded over the ranks"
            )
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
        """Evaluate the rest of the current pass over the validation data, or the next `num_steps` batches.

        The call is repeated up to three times if ranks are lost.

        Args:
            num_steps: Number of batches of each rank. None: to the end of the pass.
            profile: Whether to measure the parts of each step, as in `train`.
            reduce_results: Whether to return one dict instead of a list with one dict per rank.
            info: Passed to `validate` of the operator and, as part of `batch_info`, to `validate_batch`.

        Returns:
            The result of the operator's `validate`: by default `batch_count`, `num_samples`, `val_loss`,
            `val_accuracy`, `last_val_loss` and `last_val_accuracy`; reduced over ranks as by `train`.

        Raises:
            MissingLoader: `setup` has registered no validation_loader. A RuntimeError and a ValueError.
            Exception: Otherwise as `train`.
        """
        arguments = {"num_steps": num_steps, "profile": profile, "info": info}
        return self._open_gang.change(Call("validate", arguments, _then(reduce_results)))

    def apply_all_workers(self, fn: Callable[[], Any]) -> list[Any]:
        """Call `fn()` on each rank and return the results in rank order.

        Args:
            fn: A function without arguments; it is sent to the ranks with cloudpickle.

        Raises:
            Exception: Any exception that `fn` raises on a rank; otherwise as `train`.
        """
        results: list[Any] = self._open_gang.change(Call("apply", {"function": fn}))
        return results

    def apply_all_operators(self, fn: Callable[[TrainingOperator], Any]) -> list[Any]:
        """Call `fn(operator)` on each rank and return the results in rank order.

        Args:
            fn: A function whose argument is the rank's operator; it is sent to the ranks with cloudpickle. Its changes
                to models and optimizers survive the loss of a rank; other changes survive only if the operator's
                `state_dict` contains them.

        Raises:
            Exception: Any exception that `fn` raises on a rank; otherwise as `train`.
        """
        results: list[Any] = self._open_gang.change(Call("apply_operator", {"function": fn}))
        return results

    def update_scheduler(self, metric: float) -> None:
        """Call `step(metric)` on every registered scheduler of every rank.

        Args:
            metric: The argument of the schedulers' `step`, for example a validation loss for ReduceLROnPlateau.
        """
        self._open_gang.change(Call("update_scheduler", {"metric": metric}))

    def get_model(self, to_cpu: bool = False) -> nn.Module | list[nn.Module]:
        """Return a copy of the trained model, or a list of copies if several models are registered.

        The copies are not wrapped in DistributedDataParallel.

        Args:
            to_cpu: Whether the copies are on the CPU. False: on this process's GPU, if the ranks use GPUs and this
                process has one.
        """
        models = self._open_gang.ask("models", to_cpu=True)  # a driver without a GPU could not unpickle GPU tensors
        if not to_cpu and self._settings.use_gpu and torch.cuda.is_available():
            models = [model.cuda() for model in models]
        self._open_gang.note_read()
        return models[0] if len(models) == 1 else list(models)

    def get_local_operator(self) -> TrainingOperator:
        """Return the operator of rank 0, which is in this process.

        Raises:
            NotImplementedError: The trainer was created without `use_local=True`.
        """
        operator = self._open_gang.local_operator
        if operator is None:
            raise NotImplementedError(
                "get_local_operator: no rank is in this process; use TorchTrainer(use_local=True)"
            )
        return operator

    def state_dict(self) -> dict[str, Any]:
        """Return the state of rank 0's operator, with tensors on the CPU.

        Its keys are `epoch`, `operator`, `models` and `optimizers`, and, if they are used, `schedulers` and
        `amp_native` or `amp_apex`.
        """
        state: dict[str, Any] = self._open_gang.ask("state_dict")
        self._open_gang.note_read()
        return state

    def load_state_dict(self, state_dict: dict[str, Any], blocking: bool = True) -> None:
        """Load a state into all ranks, on any number of them. An open pass over the training data is abandoned.

        When this returns, the state is loaded, and on disk if the run is not temporary.

        Args:
            state_dict: A state that `state_dict` has returned.
            blocking: Ignored; the call always blocks. RaySGD's default, False, does not, so that errors are lost.

        Raises:
            UsageError: The state has other parts than the operator has registered.
        """
        self._open_gang.load(state_dict)

    def save(self, path: str | os.PathLike[str]) -> str | os.PathLike[str]:
        """Write `state_dict()` to a file in the format of torch.save, replacing the file atomically. Return `path`.

        Args:
            path: Path of the file, on this machine.

        Raises:
            OSError: The file cannot be written.
        """
        write_state(self._open_gang.ask("state_dict"), Path(path))
        self._open_gang.note_read()
        return path

    def load(self, path: str | os.PathLike[str], weights_only: bool = True) -> None:
        """Load a file that `save` has written into all ranks.

        Args:
            path: Path of the file, on this machine.
            weights_only: Whether to refuse files that contain other objects than tensors and plain data. False: the
                file is unpickled, which can run any code; use it only for files that you trust.

        Raises:
            NoSuchState: A FileNotFoundError; the file does not exist.
            HpcDetError: The file is not a state, or contains other objects.
            UsageError: The state has other parts than the operator has registered.
        """
        self.load_state_dict(read_state(Path(path), weights_only))

    def restore(self, *args: Any) -> None:
        """Raise DeprecationWarning, as RaySGD does: use `load`."""
        raise DeprecationWarning("TorchTrainer.restore was removed; use load")

    def shutdown(self, force: bool = False) -> None:
        """End all ranks, node agents and jobs. Afterwards all methods raise TrainerIsShutDown, a RuntimeError.

        If a Ctrl-C interrupts the shutdown, it is completed when the program exits. If the run is temporary, and an
        exception was raised after training whose state the program has neither saved nor read, the newest snapshot is
        kept on disk, and a warning names its folder.

        Args:
            force: Whether to kill the ranks instead of waiting up to 5 seconds for them to exit.
        """
        self._end(force, sys.exc_info()[1])

    def _end(self, force: bool, error: BaseException | None) -> None:
        """Shut down. `error`: the exception that ends the program; None: it has finished, or handles its errors."""
        gang = self._gang
        if gang is None:
            return
        is_error = gang.has_failed or isinstance(error, Exception)
        try:
            if self._run.is_temporary and gang.has_unread_training and is_error:
                self._keep(gang)
        finally:
            gang.stop(force)
            self._gang = None
            gang.record.end(error)
            self._run.remove_if_temporary()

    def _keep(self, gang: ElasticGang) -> None:
        """Write the newest snapshot of a temporary run to the disk, and make the run permanent."""
        try:
            is_kept = gang.keep()
        except OSError as error:
            # Not raised: this exception would hide the one that ends the program.
            _log.warning("the newest snapshot could not be written to disk: %s", error)
            return
        if is_kept:
            self._run = self._run.kept()
            _log.warning(
                "an exception was raised after train() call %d, whose state was not saved; the newest snapshot is "
                "kept: TorchTrainer(run=%r) continues from it; remove that folder when you do not need it",
                gang.calls,
                str(self._run.folder.path),
            )

    @classmethod
    def as_trainable(cls, *args: Any, override_tune_step: Callable[..., Any] | None = None, **kwargs: Any) -> type:
        """Return a Trainable class for `tune_run` that creates one trainer with these arguments for each trial.

        A step of a trial is `train()` and `validate()`, and its metrics are the results of both.

        Args:
            *args: Positional arguments of the trainer, for subclasses that have any.
            override_tune_step: A function `f(trainer, info)` that replaces this step and returns the metrics, a dict;
                `info` is `{"iteration": k}` with k from 0. None: the default step.
            **kwargs: Arguments of the trainer. The config of the trial overlays `config`.

        Raises:
            WrongStep: A ValueError; `override_tune_step` does not have exactly two parameters.
        """
        from hpc_det.sgd.tune.trainable import trainable_of

        return trainable_of(cls, *args, override_tune_step=override_tune_step, **kwargs)

    def __enter__(self) -> TorchTrainer:
        return self

    def __exit__(self, *error: object) -> None:
        # After an exception ranks may be stuck in a collective, so do not wait for them.
        self.shutdown(force=error[0] is not None)

    @property
    def _open_gang(self) -> ElasticGang:
        """The gang. Raises TrainerIsShutDown after `shutdown`."""
        if self._gang is None:
            raise TrainerIsShutDown("this trainer was shut down; create another TorchTrainer")
        self._earlier_errors = uncaught()
        return self._gang

    def _settings_for(self, size: int) -> RankSettings:
        """Return the ranks' settings for a gang of `size` ranks, with each rank's share of the batch size."""
        config = dict(self.config)
        if BATCH_SIZE in config:
            # Divided from the requested size each time, so that rounding does not add up over several sizes.
            if config[BATCH_SIZE] % size:
                share = config[BATCH_SIZE] // size
                _log.warning(
                    "config[BATCH_SIZE] is %d, which %d ranks do not divide: each trains %d samples, %d in all",
                    config[BATCH_SIZE],
                    size,
                    share,
                    share * size,
                )
            config[BATCH_SIZE] //= size
        return replace(self._settings, config=config)


def _then(reduce_results: bool) -> Callable[[list[Any]], Any]:
    """Return the function that makes the result of a call from the list of the ranks' results."""
    return reduce if reduce_results else list


_alive: weakref.WeakSet[TorchTrainer] = weakref.WeakSet()
"""The trainers of this process, which `_shut_down_all` shuts down."""


@atexit.register
def _shut_down_all() -> None:
    """Shut down the trainers of a program that ends without `shutdown`, by an exception, `sys.exit` or Ctrl-C."""
    # KeyboardInterrupt and SystemExit are not of type Exception: the user ended the program, so nothing is kept.
    ends = (SystemExit(),) if was_terminated() else ()
    for trainer in list(_alive):
        trainer._end(force=True, error=next(iter(uncaught(but=trainer._earlier_errors) or ends), None))
