"""What a PyTorchTrial can ask and must wrap."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch

from hpc_det.distributed.collectives import Distributed
from hpc_det.errors import UsageError
from hpc_det.pytorch.strategies.amp import Precision
from hpc_det.pytorch.strategies.ddp import DataParallel, data_parallel, synchronized_batch_norm
from hpc_det.pytorch.strategies.fusion import FusionTuner
from hpc_det.pytorch.strategies.parameters import Unshared, is_sharded, obstacles
from hpc_det.pytorch.trial.trial_context import TrialContext, parameters_of
from hpc_det.store.folders import TrialFolder

Model = TypeVar("Model", bound=torch.nn.Module)
Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)
Scheduler = TypeVar("Scheduler", bound=torch.optim.lr_scheduler.LRScheduler)
ClipGrads = Callable[[Iterator[torch.nn.Parameter]], Any]


class PyTorchTrialContext(TrialContext):
    """Wraps what is trained, and takes the steps of training."""

    own_loaders_allowed_by = "context.experimental.disable_dataset_reproducibility_checks"

    def __init__(self, spec: dict[str, Any], distributed: Distributed, folder: TrialFolder | None = None) -> None:
        super().__init__(spec, distributed, folder)
        optimizations = spec["config"].get("optimizations", {})
        self.aggregation_frequency: int = optimizations.get("aggregation_frequency", 1)
        """Batches between optimizer steps."""
        self._averages_gradients: bool = optimizations.get("average_aggregated_gradients", True)
        self._compresses_gradients: bool = optimizations.get("gradient_compression", False)
        self._bucket_mb: int | None = optimizations.get("tensor_fusion_threshold")
        self._tunes_buckets: bool = optimizations.get("auto_tune_tensor_fusion", False)
        self.fusion: FusionTuner | None = None
        """In training, where the size of DDP's buckets is to be found out."""
        self.experimental = PyTorchExperimentalContext(self)
        self.precision = Precision(self.device, automatic=optimizations.get("mixed_precision", "O0") == "O1")
        self.models: list[torch.nn.Module] = []
        """As given to `wrap_model`, without the wrapping: what checkpoints hold."""
        self.wrapped_models: list[torch.nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.scheduled_steps: list[ScheduledStep] = []
        self._averages: dict[int, bool] = {}
        """By id() of an optimizer: whether its aggregated gradients are averaged, or summed."""
        self._steps_now = True
        self._unshared = Unshared("wrap_model")

    @property
    def lr_schedulers(self) -> list[torch.optim.lr_scheduler.LRScheduler]:
        return [step.scheduler for step in self.scheduled_steps]

    @property
    def has_sharded_models(self) -> bool:
        return any(map(is_sharded, self.models))

    # --- wrapping

    def wrap_model(self, model: Model, *, sync_batch_norm: bool = False, **ddp_options: Any) -> Model:
        """The model on this rank's device; with several ranks in DistributedDataParallel(**ddp_options), unless torch's
        fully_shard has spread it over all of them.

        What is returned has the model's own attributes and methods either way. Call it before an optimizer is
        made, and, where a model is thawed later, before all of it is frozen. `sync_batch_norm`: batch norms over all
        ranks (GPUs only). Raises UsageError for a model that is sharded in another way.
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
        self.precision.prepare(own)
        self.models.append(own)
        trains = any(parameter.requires_grad for parameter in own.parameters())
        in_ddp = trains and self.distributed.size > 1 and not is_sharded(own)
        wrapped = self._data_parallel(own, ddp_options) if in_ddp else own
        self.wrapped_models.append(wrapped)
        if self.distributed.size > 1 and not in_ddp:
            self._unshared.add(own)
        return cast(Model, wrapped)

    def wrap_optimizer(
        self,
        optimizer: Optimizer,
        backward_passes_per_step: int = 1,
        fp16_compression: bool | None = None,
        average_aggregated_gradients: bool | None = None,
    ) -> Optimizer:
        """`fp16_compression`: gradients of this optimizer's models are exchanged as float16.

        `average_aggregated_gradients` overrides optimizations.average_aggregated_gradients. `backward_passes_per_step`
        had a meaning under horovod alone: DDP counts backward passes by itself.
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
        """The loop steps it after every `frequency` batches, epochs or optimizer steps, or leaves it to the trial.

        Raises UsageError where its optimizer is not wrapped, or ReduceLROnPlateau is not stepped by hand.
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
        """A scaler that the trial uses by itself, in `scale(loss)`, `step_optimizer(..., scaler=...)` and `update()`.

        Call it before `wrap_model`, once. Checkpoints hold its state.
        """
        self.precision.take_scaler(scaler)
        return scaler

    def configure_apex_amp(
        self, models: Any, optimizers: Any, enabled: bool = True, opt_level: str = "O1", **options: Any
    ) -> tuple[Any, Any]:
        """For trials that were written for NVIDIA's apex.amp, which its authors have given up for torch's own AMP.

        Off (`enabled=False` or level O0) it gives back what it got; otherwise it raises UsageError.
        """
        if enabled and opt_level != "O0":
            raise UsageError(
                f"configure_apex_amp: opt_level is {opt_level!r}, and apex.amp is no longer maintained or supported; "
                f"call context.experimental.use_amp() before wrap_model instead"
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
        """loss.backward(...), scaled where `use_amp` needs it."""
        self.precision.scaled(loss).backward(gradient, retain_graph, create_graph)  # type: ignore[no-untyped-call]

    def step_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        clip_grads: ClipGrads | None = None,
        auto_zero_grads: bool = True,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        """Step and zero. `clip_grads` gets the optimizer's parameters first, with their true gradients.

        With `optimizations.aggregation_frequency` F only every F-th batch does anything. `scaler`: the one given to
        `wrap_scaler`, if any.
        """
        if not auto_zero_grads and self.aggregation_frequency > 1:
            raise UsageError(
                f"step_optimizer: auto_zero_grads=False does not go with optimizations.aggregation_frequency "
                f"{self.aggregation_frequency}: gradients are summed over batches in between; leave one of them out"
            )
        if id(optimizer) not in self._averages:
            raise UsageError(
                f"step_optimizer: this {type(optimizer).__name__} is not wrapped, and no checkpoint would hold its "
                f"state; call context.wrap_optimizer in __init__, and step the optimizer that it returns"
            )
        if not self._steps_now:
            return
        if self.aggregation_frequency > 1:
            self._average_gradients(optimizer)
        if clip_grads is not None:
            self.precision.unscale(optimizer, scaler)
            clip_grads(iter(parameters_of(optimizer)))
        self.precision.step(optimizer, scaler)
        if auto_zero_grads:
            optimizer.zero_grad()

    # --- called by the loop

    def begin_fusion(self) -> None:
        """Before anything is restored, which may be what was found out."""
        if self._tunes_buckets and self.distributed.size > 1:
            self.fusion = FusionTuner(self.distributed, self.wrapped_models)

    @contextlib.contextmanager
    def keeping_gradients(self) -> Iterator[None]:
        """For a batch without an optimizer step: its gradients stay on this rank, added to those that are there."""
        self._steps_now = False
        with contextlib.ExitStack() as stack:
            for model in self.wrapped_models:
                if isinstance(model, DataParallel):
                    stack.enter_context(model.no_sync())
            yield
        self._steps_now = True

    def let_go(self) -> None:
        """Training is over, and the process group may end before the models do."""
        for model in self.wrapped_models:
            if isinstance(model, DataParallel):
                model.let_go()

    # --- helpers

    def _data_parallel(self, model: torch.nn.Module, options: dict[str, Any]) -> DataParallel:
        if options.get("static_graph") and self.aggregation_frequency > 1:
            raise UsageError(
                f"wrap_model: static_graph=True does not go with optimizations.aggregation_frequency "
                f"{self.aggregation_frequency}, since not every batch exchanges gradients; leave one of them out"
            )
        if not self._tunes_buckets and self._bucket_mb is not None and "bucket_cap_mb_list" not in options:
            options = {"bucket_cap_mb": self._bucket_mb, **options}
        wrapped = data_parallel(model, self.device, options)
        if self._compresses_gradients:
            wrapped.compress_gradients()
        return wrapped

    def _average_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Over the batches since the last step; DDP averages over ranks."""
        if not self._averages[id(optimizer)]:
            return
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None:
                parameter.grad.div_(self.aggregation_frequency)

    def _compress_gradients_of(self, optimizer: torch.optim.Optimizer) -> None:
        trained = {id(parameter) for parameter in parameters_of(optimizer)}
        for model in self.wrapped_models:
            if isinstance(model, DataParallel) and any(id(parameter) in trained for parameter in model.parameters()):
                model.compress_gradients()


class PyTorchExperimentalContext:
    def __init__(self, context: PyTorchTrialContext) -> None:
        self._context = context

    def use_amp(self, dtype: torch.dtype | None = None) -> None:
        """Automatic mixed precision, all of it: forward passes under autocast, losses scaled where float16 needs it.

        Call it before `wrap_model`, and not together with `wrap_scaler`. `dtype`: torch.float16, which comes with a
        gradient scaler, or torch.bfloat16, which needs none; by default float16 on a GPU and bfloat16 on a CPU.
        """
        self._context.precision.use_amp(dtype)

    def disable_dataset_reproducibility_checks(self) -> None:
        """Allow other loaders than hpc_det's. They shuffle, repeat, shard and skip by themselves."""
        self._context.checks_dataset_reproducibility = False

    def disable_auto_to_device(self) -> None:
        """The trial moves each batch by itself, with `context.to_device`."""
        self._context.to_device_automatically = False


class LRScheduler:
    """Upstream's name for the place where the step modes live."""

    class StepMode(enum.Enum):
        STEP_EVERY_EPOCH = 1
        STEP_EVERY_BATCH = 2
        MANUAL_STEP = 3
        STEP_EVERY_OPTIMIZER_STEP = 4


@dataclass(frozen=True)
class ScheduledStep:
    """A wrapped scheduler and when the loop steps it.

    Never on a batch without an optimizer step: with gradients aggregated over several batches, what the batches since
    the last optimizer step were owed is made up for at the next one.
    """

    scheduler: torch.optim.lr_scheduler.LRScheduler
    mode: LRScheduler.StepMode
    frequency: int

    def after_optimizer_step(self, batch: int, aggregation: int, epochs: Callable[[], range]) -> None:
        """After the optimizer step of `batch` (from 0), which ends a window of `aggregation` batches.

        `epochs()`: the epochs that end before the next optimizer step, whose batch lies in a later one.
        """
        for _ in range(self._steps(batch, aggregation, epochs)):
            self.scheduler.step()

    def _steps(self, batch: int, aggregation: int, epochs: Callable[[], range]) -> int:
        if self.mode is LRScheduler.StepMode.STEP_EVERY_BATCH:
            return _multiples(range(batch + 1 - aggregation, batch + 1), self.frequency)
        if self.mode is LRScheduler.StepMode.STEP_EVERY_OPTIMIZER_STEP:
            step = batch // aggregation
            return _multiples(range(step, step + 1), self.frequency)
        if self.mode is LRScheduler.StepMode.STEP_EVERY_EPOCH:
            return _multiples(epochs(), self.frequency)
        return 0


def _multiples(numbers: range, frequency: int) -> int:
    """How many n of `numbers` complete a period: (n + 1) % frequency == 0."""
    return numbers.stop // frequency - numbers.start // frequency
