"""What an operator was told, and what its `setup` registers."""

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

NEEDED_METHODS = {"optimizers": ("step", "zero_grad", *_STATE), "schedulers": ("step", *_STATE)}
"""Any object that has these: apex and others have optimizers that are no torch.optim.Optimizer."""


class BaseOperator:
    """TrainingOperator without its loops."""

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
        world_size: int = 1,
    ) -> None:
        """Calls `setup`. TorchTrainer makes operators; nobody else needs to.

        Raises as check_options, and MissingApex, an ImportError.
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
        """Without any wrapping."""
        self._wrapped: list[nn.Module] = []
        self._optimizers: list[Any] = []
        self._schedulers: list[Any] = []
        self._criterion: Any = None
        self._train_loader: Iterable[Any] | None = None
        self._validation_loader: Iterable[Any] | None = None
        self._to_device = ToDevice(self._device) if self.use_gpu else None
        """Batches are on the CPU as they come."""
        self.timers = TimerCollection(self._device)
        self.global_step = 0
        """Batches trained."""
        self.setup(config)

    # --- what users override

    def setup(self, config: dict[str, Any]) -> None:
        """Makes models, optimizers and data, and calls `register` and `register_data`."""
        raise NotImplementedError(
            f"{type(self).__name__} has no setup(config); define it, and call self.register(...) there"
        )

    def state_dict(self) -> dict[str, Any] | None:
        """State beyond models, optimizers and schedulers."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what `state_dict` gave."""

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
        """models, optimizers, and criterion and schedulers if given: on the device, models in DDP for several ranks.

        One object, a tuple or a list of them comes back as such. `ddp_args` go to DistributedDataParallel, `apex_args`
        to apex.amp.initialize. A second call replaces the first.

        Raises BadModel, an AssertionError, for a model that is no nn.Module; BadArgument, a ValueError, for schedulers
        without scheduler_step_freq and for anything else that cannot be used.
        """
        check_registered(
            models, optimizers, schedulers, self._scheduler_step_freq, ddp_args=ddp_args, apex_args=apex_args
        )
        on_device = [model.to(self._device) for model in as_list(models)]
        self._optimizers = as_list(optimizers)
        self._schedulers = as_list(schedulers) if schedulers is not None else []
        self._criterion = criterion.to(self._device) if hasattr(criterion, "to") else criterion
        if self._precision:
            self._precision.prepare(on_device, self._optimizers, apex_args or {})
        self._models = [unwrapped(model) for model in on_device]
        self._unshared = Unshared("register")
        self._wrapped = [self._data_parallel(model, ddp_args or {}) for model in on_device]
        for optimizer in self._optimizers:
            self._unshared.watch(optimizer)
        back = [shaped(self._wrapped, models), shaped(self._optimizers, optimizers)]
        back += [self._criterion] if criterion is not None else []
        back += [shaped(self._schedulers, schedulers)] if schedulers is not None else []
        return tuple(back)

    def _data_parallel(self, model: nn.Module, options: dict[str, Any]) -> nn.Module:
        """DDP refuses a model in which nothing is trained."""
        if not (self._is_distributed and self._wrap_ddp) or isinstance(model, DistributedDataParallel):
            return model
        if not any(parameter.requires_grad for parameter in model.parameters()):
            self._unshared.add(model)
            return model
        return data_parallel(model, self._device, options)

    def register_data(
        self, *, train_loader: Iterable[Any] | None = None, validation_loader: Iterable[Any] | None = None
    ) -> None:
        """Any iterables of batches. Of several ranks each reads its share of a DataLoader over a map-style dataset."""
        self._train_loader = train_loader
        self._validation_loader = validation_loader

    def _get_train_loader(self) -> Iterable[Any]:
        return _there(self._train_loader, "train_loader", "train")

    def _get_validation_loader(self) -> Iterable[Any]:
        return _there(self._validation_loader, "validation_loader", "validate")

    # --- what loops of the user's own call

    def autocast(self) -> AbstractContextManager[Any]:
        """Around forward pass and loss. Nothing without use_fp16."""
        return self._precision.autocast() if self._precision else _NO_AUTOCAST

    def backward(self, loss: torch.Tensor) -> None:
        """loss.backward(), scaled where use_fp16 needs it."""
        if self._precision:
            self._precision.backward(loss)
        else:
            loss.backward()  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: Any) -> None:
        """Between `backward` and `step`, for what needs the true gradients, such as clipping."""
        if self._precision:
            self._precision.unscale(optimizer)

    def step(self, optimizer: Any) -> None:
        """optimizer.step(), left out where use_fp16 has made gradients infinite."""
        if self._precision:
            self._precision.step(optimizer)
        else:
            optimizer.step()

    @property
    def _amp(self) -> Any:
        """RaySGD 1.8's name, with `autocast()`, or apex.amp itself: for loops that were written for that."""
        return self._precision.amp if self._precision else None

    @property
    def _amp_scaler(self) -> torch.amp.GradScaler | None:
        return self._precision.scaler if self._precision else None

    # --- where and how it runs

    @property
    def config(self) -> dict[str, Any]:
        return self._config

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def device_ids(self) -> list[int] | None:
        """For a DistributedDataParallel of the user's own. None on a CPU."""
        if self._device.type != "cuda":
            return None
        return [torch.cuda.current_device() if self._device.index is None else self._device.index]

    @property
    def world_rank(self) -> int:
        return self._world_rank

    @property
    def local_rank(self) -> int:
        """Among the ranks of this node."""
        return self._local_rank

    @property
    def world_size(self) -> int:
        return self._world_size

    @property
    def is_distributed(self) -> bool:
        """Whether there is a process group, which one rank alone has not."""
        return self._is_distributed

    @property
    def use_gpu(self) -> bool:
        return self._device.type == "cuda"

    @property
    def use_fp16(self) -> UseFp16:
        return self._use_fp16

    @property
    def use_fp16_native(self) -> bool:
        return self._use_fp16 is True

    @property
    def use_fp16_apex(self) -> bool:
        return self._use_fp16 == "apex"

    @property
    def use_tqdm(self) -> bool:
        return self._use_tqdm

    @property
    def scheduler_step_freq(self) -> str | None:
        return self._scheduler_step_freq


def _there(loader: Iterable[Any] | None, name: str, call: str) -> Iterable[Any]:
    if loader is None:
        raise MissingLoader(f"{call}() needs data; call self.register_data({name}=...) in setup")
    return loader


# --- what `register` takes: one object, or several in a tuple or list, which come back the way they went in


def as_list(given: Any) -> list[Any]:
    """Only tuples and lists are several: nn.Sequential, and an optimizer that can be iterated, are one object."""
    return list(given) if isinstance(given, (tuple, list)) else [given]


def shaped(handled: Sequence[Any], given: Any) -> Any:
    """As `given` was: alone, in a tuple or in a list."""
    if isinstance(given, (tuple, list)):
        return list(handled) if isinstance(given, list) else tuple(handled)
    return handled[0]


def unwrapped(model: nn.Module) -> nn.Module:
    """Of a DistributedDataParallel of the user's own."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def check_registered(
    models: Any, optimizers: Any, schedulers: Any, scheduler_step_freq: str | None, **options: Any
) -> None:
    """Raises BadModel, an AssertionError, for no nn.Module; BadArgument, a ValueError, for all else."""
    if wrong := [f"register: models has {shown(model)}; use nn.Module" for model in _no_modules(models)]:
        raise BadModel(wrong)
    problems = [*_lacks("optimizers", optimizers), *_lacks("schedulers", schedulers)]
    if schedulers is not None and scheduler_step_freq is None:
        problems.append(
            "register: schedulers are given, and scheduler_step_freq is None; "
            "give TorchTrainer scheduler_step_freq='batch', 'epoch' or 'manual'"
        )
    problems += [
        f"register: {name} is {shown(value)}; use a dict"
        for name, value in options.items()
        if not isinstance(value, (dict, type(None)))
    ]
    if problems:
        raise BadArgument(problems)


def _no_modules(models: Any) -> Iterable[Any]:
    return (model for model in as_list(models) if not isinstance(model, nn.Module))


def _lacks(name: str, given: Any) -> Iterable[str]:
    for one in as_list(given) if given is not None else ():
        if missing := [method for method in NEEDED_METHODS[name] if not callable(getattr(one, method, None))]:
            yield f"register: {name} has {shown(one)} without {', '.join(missing)}"
