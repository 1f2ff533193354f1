"""The context of a PyTorchTrial: it wraps models, optimizers and schedulers, and does the steps of training."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch

from hpc_det.core.state_dicts import parameters_of
from hpc_det.distributed.collectives import Distributed
from hpc_det.errors import UsageError
from hpc_det.pytorch.strategies.amp import Precision
from hpc_det.pytorch.strategies.ddp import DataParallel, data_parallel, synchronized_batch_norm
from hpc_det.pytorch.strategies.fusion import FusionTuner
from hpc_det.pytorch.strategies.parameters import Unshared, is_sharded, obstacles
from hpc_det.pytorch.trial.trial_context import TrialContext
from hpc_det.store.folders import TrialFolder

Model = TypeVar("Model", bound=torch.nn.Module)
Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)
Scheduler = TypeVar("Scheduler", bound=torch.optim.lr_scheduler.LRScheduler)
ClipGrads = Callable[[Iterator[torch.nn.Parameter]], Any]


class PyTorchTrialContext(TrialContext):
    """One rank's context of a PyTorchTrial.

    In `__init__` of the trial, wrap each model, then its optimizer, then the optimizer's scheduler. Checkpoints contain
    what is wrapped, in the order of wrapping, so that order must stay the same between a save and a resume. In
    `train_batch`, call `backward` and `step_optimizer`.
    """

    own_loaders_allowed_by = "context.experimental.disable_dataset_reproducibility_checks"

    def __init__(self, spec: dict[str, Any], distributed: Distributed, folder: TrialFolder | None = None) -> None:
        super().__init__(spec, distributed, folder)
        optimizations = spec["config"].get("optimizations", {})
        self.aggregation_frequency: int = optimizations.get("aggregation_frequency", 1)
        """Number of batches per optimizer step (`optimizations.aggregation_frequency`, default 1)."""
        self._averages_gradients: bool = optimizations.get("average_aggregated_gradients", True)
        self._compresses_gradients: bool = optimizations.get("gradient_compression", False)
        self._bucket_mb: int | None = optimizations.get("tensor_fusion_threshold")
        self._tunes_buckets: bool = optimizations.get("auto_tune_tensor_fusion", False)
        self.fusion: FusionTuner | None = None
        """The tuner of DDP's bucket size during training; None if the size is not tuned."""
        self.experimental = PyTorchExperimentalContext(self)
        """Settings that Determined has under `context.experimental`: mixed precision and the checks of loaders."""
        self.precision = Precision(self.device, automatic=optimizations.get("mixed_precision", "O0") == "O1")
        self.models: list[torch.nn.Module] = []
        """The models given to `wrap_model`, on this rank's device and without DDP; checkpoints contain their state."""
        self.wrapped_models: list[torch.nn.Module] = []
        """The return values of `wrap_model`: in DDP if there are several ranks, otherwise the same as `models`."""
        self.optimizers: list[torch.optim.Optimizer] = []
        """The optimizers given to `wrap_optimizer`."""
        self.scheduled_steps: list[ScheduledStep] = []
        """The schedulers given to `wrap_lr_scheduler`, each with the events at which it steps."""
        self._averages: dict[int, bool] = {}
        """For the id() of each optimizer: True if its aggregated gradients are averaged, False if summed."""
        self._steps_now = True
        """Whether `step_optimizer` takes effect: False for batches that only accumulate gradients."""
        self._unshared = Unshared("wrap_model")

    @property
    def lr_schedulers(self) -> list[torch.optim.lr_scheduler.LRScheduler]:
        """The wrapped learning-rate schedulers, in the order of wrapping."""
        return [step.scheduler for step in self.scheduled_steps]

    @property
    def has_sharded_models(self) -> bool:
        """True if torch's `fully_shard` was applied to any of the wrapped models."""
        return any(map(is_sharded, self.models))

    # --- wrapping

    def wrap_model(self, model: Model, *, sync_batch_norm: bool = False, **ddp_options: Any) -> Model:
        """Move the model to this rank's device, wrap it in DistributedDataParallel if there are several ranks, and
        return it.

        The returned object has the attributes and methods of the model in both cases. A model to which torch's
        `fully_shard` was applied stays as it is. A model without any parameter that requires a gradient is not put
        into DDP.

        Call this method before the optimizer is created. If the whole model is to be frozen and thawed later, call it
        before the model is frozen: ranks do not exchange the gradients of a model that was frozen at this call.

        Args:
            model: The model, or one to which `fully_shard` was applied over all ranks.
            sync_batch_norm: Whether batch norms use the statistics of all ranks (torch.nn.SyncBatchNorm; needs GPUs).
            ddp_options: Keyword arguments of DistributedDataParallel, such as `find_unused_parameters`.

        Raises:
            UsageError: The model is wrapped already, is sharded over some of the ranks only, is sharded and
                `ddp_options`, `sync_batch_norm` or `optimizations.gradient_compression` is given, or is in
                FullyShardedDataParallel; `sync_batch_norm` is set and this rank has no GPU; `static_graph` is set and
                `optimizations.aggregation_frequency` is above 1.
        """
        if any(model is known for known in (*self.models, *self.wrapped_models)):
            raise UsageError(f"wrap_model: this {type(model).__name__} is wrapped already; wrap each model once")
        for_ddp = [*ddp_options, *(["sync_batch_norm"] if sync_batch_norm else [])]
        for_ddp += ["optimizations.gradient_compression"] if self._compresses_gradients else []
        if problems := list(obstacles(model, self.distributed.size, for_ddp)):
            raise UsageError([f"wrap_model: {type(model).__name__}: {problem}" for problem in problems])
        own: torch.nn.Module = model if is_sharded(model) else model.to(self.device)
        if sync_batch_norm and self.distributed.size > 1:
            own = synchronized_batch_norm(own, self.device)
        self.precision.prepare(own)  # before DDP, so that autocast is around the model's own forward pass
        self.models.append(own)
        # DDP raises an error for a model of which no parameter requires a gradient.
        trains = any(parameter.requires_grad for parameter in own.parameters())
        in_ddp = trains and self.distributed.size > 1 and not is_sharded(own)
        wrapped = self._data_parallel(own, ddp_options) if in_ddp else own
        self.wrapped_models.append(wrapped)
        if self.distributed.size > 1 and not in_ddp:
            # If its parameters were thawed later, each rank would train its own copy: check for their gradients.
            self._unshared.add(own)
        return cast(Model, wrapped)

    def wrap_optimizer(
        self,
        optimizer: Optimizer,
        backward_passes_per_step: int = 1,
        fp16_compression: bool | None = None,
        average_aggregated_gradients: bool | None = None,
    ) -> Optimizer:
        """Register the optimizer, so that checkpoints contain its state, and return the same object.

        Args:
            optimizer: An optimizer of parameters of wrapped models.
            backward_passes_per_step: Has no effect: it was needed for Horovod, and DDP counts backward passes itself.
            fp16_compression: Whether the gradients of this optimizer's models are exchanged as float16. None or False:
                only if `optimizations.gradient_compression` is set.
            average_aggregated_gradients: Whether gradients that are aggregated over several batches are averaged (True)
                or summed (False). None: as in `optimizations.average_aggregated_gradients`, whose default is True.

        Raises:
            UsageError: The optimizer is wrapped already, or `backward_passes_per_step` is below 1.
        """
        if any(optimizer is known for known in self.optimizers):
            name = type(optimizer).__name__
            raise UsageError(f"wrap_optimizer: this {name} is wrapped already; wrap each optimizer once")
        if backward_passes_per_step < 1:
            raise UsageError(f"wrap_optimizer: backward_passes_per_step is {backward_passes_per_step}; use at least 1")
        own = average_aggregated_gradients
        self._averages[id(optimizer)] = self._averages_gradients if own is None else own
        if fp16_compression and not self._compresses_gradients:
            self._compress_gradients_of(optimizer)
        if self.distributed.size > 1:
            self._unshared.watch(optimizer)
        self.optimizers.append(optimizer)
        return optimizer

    def wrap_lr_scheduler(
        self, lr_scheduler: Scheduler, step_mode: LRScheduler.StepMode, frequency: int = 1
    ) -> Scheduler:
        """Register a learning-rate scheduler, so that checkpoints contain its state, and return the same object.

        With MANUAL_STEP the trial calls `step()`; in the other modes the training loop does.

        Args:
            lr_scheduler: A scheduler of a wrapped optimizer.
            step_mode: The events at which the loop steps the scheduler: batches, epochs or optimizer steps.
            frequency: The scheduler steps at every n-th of these events.

        Raises:
            UsageError: The optimizer is not wrapped, the scheduler is wrapped already, `frequency` is below 1, or a
                ReduceLROnPlateau has another mode than MANUAL_STEP.
        """
        name = type(lr_scheduler).__name__
        if not any(lr_scheduler.optimizer is known for known in self.optimizers):
            raise UsageError(f"wrap_lr_scheduler: the optimizer of {name} is not wrapped; call wrap_optimizer first")
        by_hand = step_mode is LRScheduler.StepMode.MANUAL_STEP
        if isinstance(lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) and not by_hand:
            raise UsageError(f"wrap_lr_scheduler: {name} steps on a metric; use MANUAL_STEP")
        if any(lr_scheduler is known for known in self.lr_schedulers):
            raise UsageError(f"wrap_lr_scheduler: this {name} is wrapped already, and would step twice; wrap it once")
        if frequency < 1:
            raise UsageError(f"wrap_lr_scheduler: frequency is {frequency}; use at least 1")
        self.scheduled_steps.append(ScheduledStep(lr_scheduler, step_mode, frequency))
        return lr_scheduler

    def wrap_scaler(self, scaler: torch.amp.GradScaler) -> torch.amp.GradScaler:
        """Register the trial's own gradient scaler, so that checkpoints contain its state, and return the same object.

        The trial calls `scaler.scale(loss)`, `context.step_optimizer(..., scaler=scaler)` and `scaler.update()`.
        With `context.experimental.use_amp()` no scaler is needed.

        Args:
            scaler: The gradient scaler of all models and optimizers of the trial.

        Raises:
            UsageError: A model is wrapped already, `use_amp` or `wrap_scaler` was called before, or
                `optimizations.mixed_precision` is O1.
        """
        self.precision.take_scaler(scaler)
        return scaler

    def configure_apex_amp(
        self, models: Any, optimizers: Any, enabled: bool = True, opt_level: str = "O1", **options: Any
    ) -> tuple[Any, Any]:
        """Return `models` and `optimizers` unchanged if apex.amp is switched off, otherwise raise UsageError.

        It exists for trials that were written for NVIDIA's apex.amp, which is discontinued in favor of torch.amp.

        Args:
            models: A model or a list of models.
            optimizers: An optimizer or a list of optimizers.
            enabled: Whether apex.amp is used.
            opt_level: Apex's optimization level; "O0" is plain float32.
            options: Other arguments of `apex.amp.initialize`, which are ignored.

        Raises:
            UsageError: `enabled` is True and `opt_level` is not "O0".
        """
        if enabled and opt_level != "O0":
            raise UsageError(
                f"configure_apex_amp: opt_level is {opt_level!r}, but apex.amp is not supported, since NVIDIA does not "
                f"maintain it any longer; call context.experimental.use_amp() before wrap_model instead"
            )
        return models, optimizers

    # --- in train_batch

    def backward(
        self,
        loss: torch.Tensor,
        gradient: torch.Tensor | None = None,
        retain_graph: bool = False,
        create_graph: bool = False,
    ) -> None:
        """Call `loss.backward(...)`. With `use_amp` in float16 the loss is scaled first.

        Args:
            loss: The loss of this rank's batch, a tensor with one element unless `gradient` is given.
            gradient: Gradient with respect to `loss`, of its shape; None for a loss of one element.
            retain_graph: Whether the graph is kept for another backward pass.
            create_graph: Whether a graph of the derivative is built, for higher-order derivatives.
        """
        if self.precision.scales_losses:
            loss = self.precision.scaled(loss)
        loss.backward(gradient, retain_graph, create_graph)  # type: ignore[no-untyped-call]

    def step_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        clip_grads: ClipGrads | None = None,
        auto_zero_grads: bool = True,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        """Step the optimizer and zero its gradients.

        With `optimizations.aggregation_frequency` F this takes effect at every F-th batch only; at the other batches
        the gradients accumulate.

        Args:
            optimizer: An optimizer that was given to `wrap_optimizer`.
            clip_grads: A function that clips the gradients of an iterator over the optimizer's parameters in place;
                it is called before the step, when gradients are averaged over ranks and batches, and unscaled.
            auto_zero_grads: Whether the gradients are set to None after the step. False: the trial does it.
            scaler: The scaler that was given to `wrap_scaler`; None if there is none.

        Raises:
            UsageError: The optimizer is not wrapped, or `auto_zero_grads` is False and the aggregation frequency is
                above 1.
        """
        if optimizer not in self.optimizers:
            raise UsageError(
                f"step_optimizer: this {type(optimizer).__name__} is not wrapped, so checkpoints would not contain its "
                f"state; call context.wrap_optimizer in __init__, and step the optimizer that it returns"
            )
        if self.aggregation_frequency > 1:
            if not auto_zero_grads:
                raise UsageError(
                    f"step_optimizer: auto_zero_grads=False cannot be combined with optimizations."
                    f"aggregation_frequency {self.aggregation_frequency}, which sums gradients over batches until the "
                    f"step; leave one of them out"
                )
            if not self._steps_now:
                return
            self._average_gradients(optimizer)
        if clip_grads is not None:
            # A threshold on scaled gradients would depend on the current loss scale.
            self.precision.unscale(optimizer, scaler)
            clip_grads(iter(parameters_of(optimizer)))
        if scaler is None and not self.precision.scales_losses:
            optimizer.step()
        else:
            self.precision.step(optimizer, scaler)
        if auto_zero_grads:
            optimizer.zero_grad()

    # --- called by the loop

    def begin_fusion(self) -> None:
        """Create the tuner of DDP's bucket size if the config asks for it. Call it before state is restored into it."""
        if self._tunes_buckets and self.distributed.size > 1:  # one rank exchanges no gradients
            self.fusion = FusionTuner(self.distributed, self.wrapped_models)

    @contextlib.contextmanager
    def keeping_gradients(self) -> Iterator[None]:
        """Accumulate gradients on this rank within the block: `step_optimizer` has no effect, DDP exchanges nothing."""
        self._steps_now = False
        with contextlib.ExitStack() as stack:
            for model in self.wrapped_models:
                # A sharded model exchanges gradients at every batch: each rank would have to keep all of them.
                if isinstance(model, DataParallel):
                    stack.enter_context(model.no_sync())
            yield
        self._steps_now = True

    def let_go(self) -> None:
        """Release the process group from DDP models after training, so that it may end before the models do."""
        for model in self.wrapped_models:
            if isinstance(model, DataParallel):
                model.let_go()

    # --- helpers

    def _data_parallel(self, model: torch.nn.Module, options: dict[str, Any]) -> DataParallel:
        """Return `model` in DDP, with the bucket size and compression of the config. Raises UsageError."""
        if options.get("static_graph") and self.aggregation_frequency > 1:
            raise UsageError(
                f"wrap_model: static_graph=True cannot be combined with optimizations.aggregation_frequency "
                f"{self.aggregation_frequency}, which exchanges gradients at some batches only; leave one of them out"
            )
        # An option of wrap_model has precedence over the config.
        if not self._tunes_buckets and self._bucket_mb is not None and "bucket_cap_mb_list" not in options:
            options = {"bucket_cap_mb": self._bucket_mb, **options}
        wrapped = data_parallel(model, self.device, options)
        if self._compresses_gradients:
            wrapped.compress_gradients()
        return wrapped

    def _average_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the number of batches since the last step; DDP has already averaged over ranks."""
        if not self._averages[id(optimizer)]:
            return
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None:
                parameter.grad.div_(self.aggregation_frequency)

    def _compress_gradients_of(self, optimizer: torch.optim.Optimizer) -> None:
        """Compress the gradients of each DDP model that has a parameter of this optimizer."""
        trained = {id(parameter) for parameter in parameters_of(optimizer)}
        for model in self.wrapped_models:
            if isinstance(model, DataParallel) and any(id(parameter) in trained for parameter in model.parameters()):
                model.compress_gradients()


class PyTorchExperimentalContext:
    """Methods of `context.experimental`, named as in Determined. Call them in `__init__` of the trial."""

    def __init__(self, context: PyTorchTrialContext) -> None:
        self._context = context

    def use_amp(self, dtype: torch.dtype | None = None) -> None:
        """Switch on automatic mixed precision: forward passes run under autocast and return float32.

        With float16, `context.backward` also scales the loss and checkpoints contain the state of the gradient scaler.

        Args:
            dtype: torch.float16 or torch.bfloat16, which needs no gradient scaler. None: float16 on a GPU, bfloat16 on
                a CPU.

        Raises:
            UsageError: `dtype` is another one, a model is wrapped already, or `use_amp` or `wrap_scaler` was called
                before.
        """
        self._context.precision.use_amp(dtype)

    def disable_dataset_reproducibility_checks(self) -> None:
        """Allow training and validation loaders that are not an `hpc_det.pytorch.DataLoader`.

        Such a loader is used as it is: it must itself shuffle, repeat, shard over the ranks, and skip the first
        `context.get_initial_batch()` batches after a resume.
        """
        self._context.checks_dataset_reproducibility = False

    def disable_auto_to_device(self) -> None:
        """Pass batches to `train_batch` and `evaluate_batch` as loaded; the trial calls `context.to_device` on them."""
        self._context.to_device_automatically = False


class LRScheduler:
    """The namespace of `LRScheduler.StepMode`, as in Determined. It is not a scheduler."""

    class StepMode(enum.Enum):
        """The events at which the training loop steps a scheduler; see `wrap_lr_scheduler`.

        With gradient aggregation a scheduler steps only at batches with an optimizer step, and makes the steps of the
        other batches there, too.
        """

        STEP_EVERY_EPOCH = 1
        """Once per epoch, with the last optimizer step of the epoch."""
        STEP_EVERY_BATCH = 2
        """Once per batch."""
        MANUAL_STEP = 3
        """Never: the trial calls `step()`. Needed for ReduceLROnPlateau."""
        STEP_EVERY_OPTIMIZER_STEP = 4
        """Once per optimizer step."""


@dataclass(frozen=True)
class ScheduledStep:
    """A wrapped scheduler and the events at which the loop steps it.

    With gradients aggregated over several batches, the scheduler steps only at batches with an optimizer step: there it
    makes the steps of all batches since the last optimizer step, and of the epochs that end before the next one.
    """

    scheduler: torch.optim.lr_scheduler.LRScheduler
    mode: LRScheduler.StepMode
    frequency: int

    def after_optimizer_step(self, batch: int, aggregation: int, epochs: Callable[[], range]) -> None:
        """Step the scheduler as often as is due after an optimizer step.

        `batch` is the number of the batch, from 0, whose optimizer step was done; it ends a window of `aggregation`
        batches. `epochs()` returns the numbers of the epochs that end with this batch or with a later one before the
        batch of the next optimizer step. It is called only in the mode STEP_EVERY_EPOCH.
        """
        for _ in range(self._steps(batch, aggregation, epochs)):
            self.scheduler.step()

    def _steps(self, batch: int, aggregation: int, epochs: Callable[[], range]) -> int:
        """Return the number of scheduler steps that are due; arguments as in `after_optimizer_step`."""
        if self.mode is LRScheduler.StepMode.STEP_EVERY_BATCH:
            return _multiples(range(batch + 1 - aggregation, batch + 1), self.frequency)
        if self.mode is LRScheduler.StepMode.STEP_EVERY_OPTIMIZER_STEP:
            step = batch // aggregation
            return _multiples(range(step, step + 1), self.frequency)
        if self.mode is LRScheduler.StepMode.STEP_EVERY_EPOCH:
            return _multiples(epochs(), self.frequency)
        return 0


def _multiples(numbers: range, frequency: int) -> int:
    """Return how many n in `numbers` complete a period: (n + 1) % frequency == 0."""
    return numbers.stop // frequency - numbers.start // frequency
