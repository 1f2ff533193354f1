"""The base of TrainingOperator: its constructor arguments, and the models and data that its `setup` registers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpc_det.errors import shown
from hpc_det.pytorch.strategies.ddp import data_parallel
from hpc_det.pytorch.strategies.device import ToDevice
from hpc_det.pytorch.strategies.parameters import Unshared
from hpc_det.sgd.operator.meters import TimerCollection
from hpc_det.sgd.operator.options import BadArgument, BadModel, MissingLoader, UseFp16, check_options, precision_for

_NO_AUTOCAST = nullcontext()

_STATE = ("state_dict", "load_state_dict")

# Checked by method, not by class: optimizers of apex and others do not derive from torch.optim.Optimizer.
NEEDED_METHODS = {"optimizers": ("step", "zero_grad", *_STATE), "schedulers": ("step", *_STATE)}
"""Methods that an optimizer or a scheduler must have."""


class BaseOperator:
    """The part of TrainingOperator that users call but do not override; it has no training loops."""

    def __init__(
        self,
        config: dict[str, Any],
        world_rank: int,
        local_rank: int,
        is_distributed: bool = False,
        use_gpu: bool = False,
        device: torch.device | None = None,
        use_fp16: UseFp16 = False,
        use_tqdm: bool = False,
        wrap_ddp: bool = False,
        add_dist_sampler: bool = False,
        scheduler_step_freq: str | None = None,
        *,
        world_size: int = 1,  # keyword-only: RaySGD's constructor has the arguments above, in this order
    ) -> None:
        """Store the arguments and call `setup(config)`. TorchTrainer creates one operator on each rank.

        Args:
            config: The user's config; `config[BATCH_SIZE]` is this rank's share of the batch size.
            world_rank: Number of this rank in the gang, from 0.
            local_rank: Number of this rank on its node, from 0.
            is_distributed: Whether the gang has several ranks, and so a process group.
            use_gpu: Whether the rank has a GPU; used only if `device` is None.
            device: Device of models and batches. None: "cuda" if `use_gpu`, else "cpu".
            use_fp16: True for torch's mixed precision, "apex" for NVIDIA's apex, False for float32.
            use_tqdm: Whether rank 0 shows a progress bar.
            wrap_ddp: Whether `register` wraps models in DistributedDataParallel if there are several ranks.
            add_dist_sampler: Whether DataLoaders are sharded over the ranks.
            scheduler_step_freq: When the default loop steps the scheduler: "batch", "epoch", "manual" or None.
            world_size: Number of ranks in the gang.

        Raises:
            BadArgument: A ValueError; `use_fp16`, `use_tqdm` or `scheduler_step_freq` has an invalid value.
            MissingApex: An ImportError; `use_fp16` is "apex" and apex cannot be imported.
            NotImplementedError: The class has no `setup`.
        """
        check_options(use_fp16=use_fp16, use_tqdm=use_tqdm, scheduler_step_freq=scheduler_step_freq)
        self._config = config
        self._world_rank = world_rank
        self._local_rank = local_rank
        self._world_size = world_size
        self._is_distributed = is_distributed
        self._device = device or torch.device("cuda" if use_gpu else "cpu")
        self._use_fp16 = use_fp16
        self._use_tqdm = use_tqdm
        self._wrap_ddp = wrap_ddp
        self._add_dist_sampler = add_dist_sampler
        self._scheduler_step_freq = scheduler_step_freq
        self._precision = precision_for(use_fp16, self._device)
        self._models: list[nn.Module] = []
        """The registered models without DistributedDataParallel."""
        self._wrapped: list[nn.Module] = []
        """The registered models as `register` returned them: in DistributedDataParallel where it is needed."""
        self._optimizers: list[Any] = []
        self._schedulers: list[Any] = []
        self._criterion: Any = None
        self._train_loader: Iterable[Any] | None = None
        self._validation_loader: Iterable[Any] | None = None
        # Loaders give batches on the CPU, so a CPU rank needs no copy.
        self._to_device = ToDevice(self._device) if self.use_gpu else None
        self.timers = TimerCollection(self._device)
        """Timers that run in calls with `profile=True`."""
        self.global_step = 0
        """Number of batches that the default `train_epoch` has trained on this rank; kept across restarts."""
        self.setup(config)

    # --- what users override

    def setup(self, config: dict[str, Any]) -> None:
        """Create models, optimizers and data loaders, and call `register` and `register_data`. Override this method.

        It is called once on each rank, and again when the gang is formed again.

        Args:
            config: The user's config; `config[BATCH_SIZE]` is this rank's share of the batch size.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no setup(config); define it, and call self.register(...) there"
        )

    def state_dict(self) -> dict[str, Any] | None:
        """Return state of the operator beyond models, optimizers and schedulers, or None. The default returns None.

        Checkpoints and snapshots contain it; override it for counters, moving averages and other such values.
        """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a value that `state_dict` returned. Not called for None; the default does nothing.

        Args:
            state_dict: The value that `state_dict` returned; a copy, so that it may be kept or changed.
        """

    # --- what `setup` calls

    def register(
        self,
        *,
        models: Any,
        optimizers: Any,
        criterion: Any = None,
        schedulers: Any = None,
        ddp_args: dict[str, Any] | None = None,
        apex_args: dict[str, Any] | None = None,
    ) -> tuple[Any, ...]:
        """Register the training components and return them ready for use. Call this method in `setup`.

        Models and the criterion are moved to the rank's device. With several ranks, models are wrapped in
        DistributedDataParallel (DDP), unless `wrap_ddp` is False, the model is wrapped already, or none of its
        parameters requires a gradient. A second call replaces the components of the first.

        Args:
            models: An nn.Module, or a tuple or list of them.
            optimizers: An optimizer, or a tuple or list of them. Any object with `step`, `zero_grad`, `state_dict` and
                `load_state_dict` is accepted.
            criterion: The loss function, or None.
            schedulers: A learning-rate scheduler, a tuple or list of them, or None. Any object with `step`,
                `state_dict` and `load_state_dict` is accepted.
            ddp_args: Keyword arguments for DistributedDataParallel, or None.
            apex_args: Keyword arguments for apex.amp.initialize, or None; used only with `use_fp16="apex"`.

        Returns:
            A tuple of models, optimizers, then criterion and schedulers if given. Each entry has the form of the
            argument: a single object, a tuple or a list.

        Raises:
            BadModel: An AssertionError; an entry of `models` is not an nn.Module.
            BadArgument: A ValueError; schedulers are given and `scheduler_step_freq` is None, a method is missing, or
                `ddp_args` or `apex_args` is not a dict.
        """
        check_registered(
            models, optimizers, schedulers, self._scheduler_step_freq, ddp_args=ddp_args, apex_args=apex_args
        )
        on_device = [model.to(self._device) for model in as_list(models)]
        self._optimizers = as_list(optimizers)
        self._schedulers = as_list(schedulers) if schedulers is not None else []
        self._criterion = criterion.to(self._device) if hasattr(criterion, "to") else criterion
        if self._precision:  # before DDP wraps the models: apex.amp changes them in place
            self._precision.prepare(on_device, self._optimizers, apex_args or {})
        self._models = [unwrapped(model) for model in on_device]  # their states have no "module." prefixes
        self._unshared = Unshared("register")
        self._wrapped = [self._data_parallel(model, ddp_args or {}) for model in on_device]
        for optimizer in self._optimizers:
            self._unshared.watch(optimizer)
        back = [shaped(self._wrapped, models), shaped(self._optimizers, optimizers)]
        back += [self._criterion] if criterion is not None else []
        back += [shaped(self._schedulers, schedulers)] if schedulers is not None else []
        return tuple(back)

    def _data_parallel(self, model: nn.Module, options: dict[str, Any]) -> nn.Module:
        """Return the model wrapped in DDP if ranks have to exchange its gradients, else the model itself."""
        if not (self._is_distributed and self._wrap_ddp) or isinstance(model, DistributedDataParallel):
            return model
        if not any(parameter.requires_grad for parameter in model.parameters()):
            # DDP's constructor raises for a model without trained parameters. If the user unfreezes a parameter later,
            # the ranks would diverge silently, so `_unshared` raises at the next optimizer step.
            self._unshared.add(model)
            return model
        return data_parallel(model, self._device, options)

    def register_data(
        self, *, train_loader: Iterable[Any] | None = None, validation_loader: Iterable[Any] | None = None
    ) -> None:
        """Register the data loaders. Call this method in `setup`.

        With `num_workers` above 1 and `add_dist_sampler`, each rank gets its shard of a DataLoader that has a map-style
        dataset and one of torch's samplers; the order is shuffled only if the loader's sampler shuffles. Other
        iterables are used unchanged, so every rank iterates over all of their batches.

        Args:
            train_loader: Any iterable of batches, or None; `train()` raises MissingLoader without one.
            validation_loader: Any iterable of batches, or None; `validate()` raises MissingLoader without one.
        """
        self._train_loader = train_loader
        self._validation_loader = validation_loader

    def _get_train_loader(self) -> Iterable[Any]:
        """Return the registered training loader. Raises MissingLoader if there is none."""
        return _there(self._train_loader, "train_loader", "train")

    def _get_validation_loader(self) -> Iterable[Any]:
        """Return the registered validation loader. Raises MissingLoader if there is none."""
        return _there(self._validation_loader, "validation_loader", "validate")

    # --- called by custom training loops

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context manager for forward pass and loss: torch.autocast, or a null context in float32."""
        return self._precision.autocast() if self._precision else _NO_AUTOCAST

    def backward(self, loss: torch.Tensor) -> None:
        """Run `loss.backward()`, with the loss scaled if `use_fp16` requires it.

        Args:
            loss: Tensor of one element.
        """
        if self._precision:
            self._precision.backward(loss)
        else:
            loss.backward()  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: Any) -> None:
        """Divide the gradients of `optimizer` by the loss scale. Call it before you clip or inspect gradients.

        Call it after `backward` and before `step`, once per optimizer and step. It does nothing where gradients are
        not scaled: without `use_fp16`, with apex, and on a CPU.

        Args:
            optimizer: The optimizer whose parameters' gradients are unscaled.
        """
        if self._precision:
            self._precision.unscale(optimizer)

    def step(self, optimizer: Any) -> None:
        """Run `optimizer.step()`; with `use_fp16=True` on a GPU, skip it if a scaled gradient is infinite or NaN.

        Args:
            optimizer: The optimizer to step.
        """
        if self._precision:
            self._precision.step(optimizer)
        else:
            optimizer.step()

    @property
    def _amp(self) -> Any:
        """RaySGD 1.8's private name: an object with `autocast()`, or apex.amp, or None without `use_fp16`."""
        return self._precision.amp if self._precision else None

    @property
    def _amp_scaler(self) -> torch.amp.GradScaler | None:
        """RaySGD 1.8's private name: the gradient scaler, or None without `use_fp16=True`."""
        return self._precision.scaler if self._precision else None

    # --- where and how the operator runs

    @property
    def config(self) -> dict[str, Any]:
        """The user's config; `config[BATCH_SIZE]` is this rank's share of the batch size."""
        return self._config

    @property
    def device(self) -> torch.device:
        """The device of this rank's models and batches."""
        return self._device

    @property
    def device_ids(self) -> list[int] | None:
        """The `device_ids` argument for a DistributedDataParallel that the user creates: a list of one GPU, or None."""
        if self._device.type != "cuda":
            return None
        return [torch.cuda.current_device() if self._device.index is None else self._device.index]

    @property
    def world_rank(self) -> int:
        """The number of this rank in the gang, from 0."""
        return self._world_rank

    @property
    def local_rank(self) -> int:
        """The number of this rank on its node, from 0."""
        return self._local_rank

    @property
    def world_size(self) -> int:
        """The number of ranks in the gang; it may differ after the gang was formed again."""
        return self._world_size

    @property
    def is_distributed(self) -> bool:
        """True if the gang has several ranks, and so a torch process group."""
        return self._is_distributed

    @property
    def use_gpu(self) -> bool:
        """True if this rank trains on a GPU."""
        return self._device.type == "cuda"

    @property
    def use_fp16(self) -> UseFp16:
        """The argument of TorchTrainer: True (torch's mixed precision), "apex" or False."""
        return self._use_fp16

    @property
    def use_fp16_native(self) -> bool:
        """True if torch's mixed precision is on."""
        return self._use_fp16 is True

    @property
    def use_fp16_apex(self) -> bool:
        """True if mixed precision of NVIDIA's apex is on."""
        return self._use_fp16 == "apex"

    @property
    def use_tqdm(self) -> bool:
        """True if rank 0 shows a progress bar."""
        return self._use_tqdm

    @property
    def scheduler_step_freq(self) -> str | None:
        """The argument of TorchTrainer: "batch", "epoch", "manual" or None."""
        return self._scheduler_step_freq


def _there(loader: Iterable[Any] | None, name: str, call: str) -> Iterable[Any]:
    """Return `loader`. Raises MissingLoader, which names the argument `name` and the method `call`, for None."""
    if loader is None:
        raise MissingLoader(f"{call}(): no {name} is registered; call self.register_data({name}=...) in setup")
    return loader


# --- arguments of `register`: one object, or a tuple or list of several, which is returned in the same form


def as_list(given: Any) -> list[Any]:
    """Return the members of a tuple or list as a list; any other object becomes the only member of a new list."""
    # Not any iterable: nn.Sequential and some optimizers can be iterated, and are one object each.
    return list(given) if isinstance(given, (tuple, list)) else [given]


def shaped(handled: Sequence[Any], given: Any) -> Any:
    """Return `handled` in the form of `given`: a single object, a tuple or a list."""
    if isinstance(given, (tuple, list)):
        return list(handled) if isinstance(given, list) else tuple(handled)
    return handled[0]


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside a DistributedDataParallel that the user made, or the model itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def check_registered(
    models: Any, optimizers: Any, schedulers: Any, scheduler_step_freq: str | None, **options: Any
) -> None:
    """Check the arguments of `register`; `options` are those that must be a dict or None.

    Raises BadModel, an AssertionError, for a model that is not an nn.Module, and BadArgument, a ValueError, that lists
    all other problems.
    """
    if wrong := [f"register: models contains {shown(model)}; use an nn.Module" for model in _no_modules(models)]:
        raise BadModel(wrong)  # RaySGD raises AssertionError for this mistake alone, so it is not one of `problems`
    problems = [*_lacks("optimizers", optimizers), *_lacks("schedulers", schedulers)]
    if schedulers is not None and scheduler_step_freq is None:
        problems.append(
            "register: schedulers are given, but scheduler_step_freq is None; "
            "pass scheduler_step_freq='batch', 'epoch' or 'manual' to TorchTrainer"
        )
    problems += [
        f"register: {name} is {shown(value)}; use a dict"
        for name, value in options.items()
        if not isinstance(value, (dict, type(None)))
    ]
    if problems:
        raise BadArgument(problems)


def _no_modules(models: Any) -> Iterable[Any]:
    """Return the members of `models` that are not an nn.Module."""
    return (model for model in as_list(models) if not isinstance(model, nn.Module))


def _lacks(name: str, given: Any) -> Iterable[str]:
    """Yield a problem for each object that lacks one of NEEDED_METHODS."""
    for one in as_list(given) if given is not None else ():
        if missing := [method for method in NEEDED_METHODS[name] if not callable(getattr(one, method, None))]:
            yield (
                f"register: {name} contains {shown(one)}, which lacks {', '.join(missing)}; "
                f"give an object that has these methods"
            )
