"""The methods that the driver calls on a rank: training, validation, and the snapshots of the operator and its data.

A snapshot has two parts. `shared` is the same on all ranks and contains the models; `own` is different on each rank and
contains the states of random generators. If a snapshot is restored with both parts on the same number of ranks,
training continues bit for bit; on another number of ranks it continues at the right sample.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hpc_det.distributed.metrics import plain
from hpc_det.distributed.rng import mixed_seed, restore_rng, rng_state, seed_everything
from hpc_det.distributed.sealed import SealedGroup, shared_secret
from hpc_det.errors import UsageError
from hpc_det.pytorch.strategies.parameters import modes, set_modes
from hpc_det.sgd.operator.options import EPOCH_IDX, NUM_STEPS, USE_FP16
from hpc_det.sgd.operator.training_operator import TrainingOperator
from hpc_det.sgd.rank import RankPlace, RankSettings
from hpc_det.sgd.rank.passes import Passes, training_source, validation_source
from hpc_det.sgd.rank.state import broadcast, load_state, on_cpu, own_buffers, set_own_buffers, share_buffers, state_of


class Runner:
    """The operator of one rank, with its passes over the data.

    With several ranks the process group must exist already, and must support CPU tensors.
    """

    def __init__(self, settings: RankSettings, place: RankPlace, secret: bytes | None = None) -> None:
        """Create the operator, which calls its `setup`; exceptions of `setup` are passed on.

        `secret`: the key with which the ranks of this gang authenticate the objects that they exchange; None: the key
        of hpc_det.distributed.sealed.shared_secret.
        """
        self._settings = settings
        self._place = place
        self._secret = secret
        device = torch.device("cuda", place.local_rank) if settings.use_gpu else torch.device("cpu")
        if settings.use_gpu:
            torch.cuda.set_device(device)
        self.operator: TrainingOperator = settings.operator_cls(
            {**settings.config},  # a copy: `setup` may change its config
            place.rank,
            place.local_rank,
            is_distributed=place.is_distributed,
            use_gpu=settings.use_gpu,
            device=device,
            use_fp16=settings.use_fp16,
            use_tqdm=settings.use_tqdm,
            wrap_ddp=settings.wrap_ddp,
            add_dist_sampler=settings.add_dist_sampler,
            scheduler_step_freq=settings.scheduler_step_freq,
            world_size=place.size,
        )
        self._training = Passes(partial(training_source, settings=settings, place=place))
        self._validation = Passes(partial(validation_source, settings=settings, place=place))

    @property
    def epochs_done(self) -> int:
        """The number of completed passes over the training data."""
        return self._training.finished

    @property
    def batches(self) -> int:
        """The number of batches drawn until now, for training and validation. Any thread may read it."""
        return self._training.drawn + self._validation.drawn

    # --- training and validation

    def train(
        self, num_steps: int | None = None, profile: bool = False, info: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Call the operator's `train_epoch` with the next `num_steps` batches; None: with the rest of the pass.

        Return the operator's result with `epoch`, the number of passes that have begun, and, if `profile` is true, with
        the durations of the parts of a step. Raises MissingLoader without a train_loader.
        """
        passes = self._training.over(self.operator._get_train_loader())
        offered = {"info": self._info(num_steps, info), "num_steps": num_steps, "epoch_idx": self.epochs_done}
        with self._profiled(profile, "train_epoch"):
            result = _called(self.operator.train_epoch, passes.batches(num_steps), offered)
        return {"epoch": passes.begun, **result, **self._profile(profile)}

    def validate(
        self, num_steps: int | None = None, profile: bool = False, info: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Call the operator's `validate` with batches of the validation_loader, and return its result.

        Arguments and errors are those of `train`; `epoch` is not added to the result.
        """
        passes = self._validation.over(self.operator._get_validation_loader())
        with self._profiled(profile, "validation"):
            result = _called(self.operator.validate, passes.batches(num_steps), {"info": self._info(num_steps, info)})
        return {**result, **self._profile(profile)}

    def _info(self, num_steps: int | None, info: dict[str, Any] | None) -> dict[str, Any]:
        """Return the user's `info` with the keys that RaySGD's operators read."""
        known = {NUM_STEPS: num_steps, USE_FP16: self._settings.use_fp16, EPOCH_IDX: self.epochs_done}
        return {**(info or {}), **known}

    @contextmanager
    def _profiled(self, profile: bool, name: str) -> Iterator[None]:
        """Reset the timers and, if `profile` is true, enable them in the `with` block, which is measured as `name`."""
        timers = self.operator.timers
        timers.reset()
        if profile:
            timers.enable()
        try:
            with timers.record(name):
                yield
        finally:
            timers.disable()

    def _profile(self, profile: bool) -> dict[str, Any]:
        return {"profile": self.operator.timers.stats()} if profile else {}

    # --- other calls of the driver

    def models(self, to_cpu: bool = False) -> list[nn.Module]:
        """Return the models without wrappers. With `to_cpu`, models on a GPU are copied to the CPU."""
        models = self.operator._models
        return [deepcopy(model).cpu() for model in models] if to_cpu and self._settings.use_gpu else models

    def update_scheduler(self, metric: Any) -> None:
        """Call `step(metric)` on every registered scheduler."""
        for scheduler in self.operator._schedulers:
            scheduler.step(metric)

    def apply(self, function: Callable[[], Any]) -> Any:
        """Return `function()`."""
        return function()

    def apply_operator(self, function: Callable[[TrainingOperator], Any]) -> Any:
        """Return `function(operator)`."""
        return function(self.operator)

    def close(self) -> None:
        """End the worker processes of the loaders."""
        self._training.close()
        self._validation.close()

    # --- states

    def state_dict(self) -> dict[str, Any]:
        """Return the state (see hpc_det.sgd.rank.state) with tensors on the CPU. Tensors on the CPU are not copied."""
        state: dict[str, Any] = on_cpu(state_of(self.operator, self._training.begun))
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state. An open pass is abandoned: the next `train()` begins a new one.

        Raises UsageError if the state has other parts than the operator.
        """
        load_state(state, self.operator)
        self._training.restart(state["epoch"])

    def level(self) -> None:
        """Copy the model buffers of rank 0 to all ranks, so that `shared` returns the same on all ranks. Collective.

        Call it before a snapshot is taken.
        """
        share_buffers(self.operator)

    def shared(self) -> dict[str, Any]:
        """Return the part of a snapshot that is the same on all ranks.

        Its tensors are not copies: save them before the next call changes them.
        """
        return {
            "state": state_of(self.operator, self._training.begun),
            "modes": modes(self.operator._models),
            "global_step": self.operator.global_step,
            "size": self._place.size,
            "training": self._training.position(),
            "validation": self._validation.position(),
        }

    def own(self) -> dict[str, Any]:
        """Return the part of a snapshot that only this rank has. Collective; call it together with `shared`."""
        return {
            "rng": rng_state(),
            "training": self._training.own(),
            "validation": self._validation.own(),
            "buffers": on_cpu(own_buffers(self.operator)),
            **self._own_operator(),
        }

    def _own_operator(self) -> dict[str, Any]:
        """Return the operator's own state under "operator", or nothing if it is the same on all ranks. Collective."""
        if not self._place.is_distributed or type(self.operator).state_dict is TrainingOperator.state_dict:
            return {}
        state = self.operator.state_dict()
        digest = _digest(state)  # compare digests: the states may be large, and of different sizes
        of_all = [torch.empty_like(digest) for _ in range(self._place.size)]
        dist.all_gather(of_all, digest)
        return {} if all(torch.equal(digest, other) for other in of_all) else {"operator": on_cpu(state)}

    def restore(self, shared: dict[str, Any] | None, own: dict[str, Any] | None) -> None:
        """Restore a snapshot. Collective.

        Only rank 0 needs `shared`, which it broadcasts. `own` is None on a rank that did not exist at the snapshot. On
        the same number of ranks, the next `train()` or `validate()` gives the same result as after the snapshot.
        """
        if self._place.is_distributed:
            shared = broadcast(on_cpu(shared), self._group())
        assert shared is not None
        state = shared["state"]
        load_state({**state, "operator": own["operator"]} if own and "operator" in own else state, self.operator)
        set_modes(self.operator._models, shared["modes"])
        self.operator.global_step = shared["global_step"]
        for name, passes, loader in self._data():
            if loader is not None:
                passes.over(loader)
            passes.restore(shared[name], own[name] if own else None)
        if own:
            self._restore_own(own)
        else:  # a new rank: its random numbers differ from those of other ranks, and depend on the snapshot alone
            seed_everything(mixed_seed("rank", self._place.rank, self.operator.global_step) % 2**32)

    def _restore_own(self, own: dict[str, Any]) -> None:
        set_own_buffers(self.operator, own["buffers"])
        for name, passes, _ in self._data():
            passes.restore_generators(own[name])
        restore_rng(own["rng"])  # last: restoring the loaders may draw random numbers

    def _data(self) -> list[tuple[str, Passes, Iterable[Any] | None]]:
        return [
            ("training", self._training, self.operator._train_loader),
            ("validation", self._validation, self.operator._validation_loader),
        ]

    def _group(self) -> SealedGroup:
        secret = shared_secret(os.environ) if self._secret is None else self._secret
        return SealedGroup(range(self._place.size), self._place.rank, secret)


def _called(hook: Callable[..., Any], batches: Iterator[Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Call the operator's method `hook` with the batches and those of the arguments `offered` that it declares.

    Return its metrics, with tensors of one element as numbers. Raises UsageError if it does not return a dict.
    """
    # RaySGD has added arguments over time: overrides that were written for release 1.2 take only (iterator, info).
    parameters = inspect.signature(hook).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    result = hook(batches, **{name: value for name, value in offered.items() if takes_all or name in parameters})
    if not isinstance(result, Mapping):
        raise UsageError(f"{hook.__qualname__} returned {type(result).__name__}, not a dict; return a dict of metrics")
    return {name: plain(value) if isinstance(value, torch.Tensor) else on_cpu(value) for name, value in result.items()}


def _digest(state: Any) -> torch.Tensor:
    """Return the SHA-256 digest of the saved state as a tensor of 32 bytes."""
    file = io.BytesIO()
    torch.save(state, file)
    return torch.frombuffer(bytearray(hashlib.sha256(file.getbuffer()).digest()), dtype=torch.uint8)
