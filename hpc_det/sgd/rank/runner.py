"""What a rank does for the driver: it holds the operator and its data, trains, evaluates, and keeps and takes states.

A snapshot has two parts. `shared` is the same on all ranks, and as large as the models; `own` is what a rank has alone,
random generators above all. Restored with both on as many ranks, training goes on bit for bit; on another number of
ranks it goes on at the right sample.
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
    """One rank. With several, the process group exists already; it must carry CPU tensors, too."""

    def __init__(self, settings: RankSettings, place: RankPlace, secret: bytes | None = None) -> None:
        """Calls the operator's `setup`, and raises what that raises.

        `secret`: what the ranks of this gang know and nobody else; None: see hpc_det.distributed.sealed.shared_secret.
        """
        self._settings = settings
        self._place = place
        self._secret = secret
        device = torch.device("cuda", place.local_rank) if settings.use_gpu else torch.device("cpu")
        if settings.use_gpu:
            torch.cuda.set_device(device)
        self.operator: TrainingOperator = settings.operator_cls(
            {**settings.config},
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
        """Whole passes over the training data that are behind us."""
        return self._training.finished

    @property
    def batches(self) -> int:
        """Drawn so far, for training and validation; any thread may ask whether something moves."""
        return self._training.drawn + self._validation.drawn

    # --- training and validation

    def train(
        self, num_steps: int | None = None, profile: bool = False, info: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The operator's `train_epoch` over the next `num_steps` batches; None: over what is left of the pass.

        What it returns, and `epoch`, the passes that have begun. Raises MissingLoader without a train_loader.
        """
        passes = self._training.over(self.operator._get_train_loader())
        offered = {"info": self._info(num_steps, info), "num_steps": num_steps, "epoch_idx": self.epochs_done}
        with self._profiled(profile, "train_epoch"):
            result = _called(self.operator.train_epoch, passes.batches(num_steps), offered)
        return {"epoch": passes.begun, **result, **self._profile(profile)}

    def validate(
        self, num_steps: int | None = None, profile: bool = False, info: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The same with the operator's `validate` and the validation_loader; there is no `epoch`."""
        passes = self._validation.over(self.operator._get_validation_loader())
        with self._profiled(profile, "validation"):
            result = _called(self.operator.validate, passes.batches(num_steps), {"info": self._info(num_steps, info)})
        return {**result, **self._profile(profile)}

    def _info(self, num_steps: int | None, info: dict[str, Any] | None) -> dict[str, Any]:
        known = {NUM_STEPS: num_steps, USE_FP16: self._settings.use_fp16, EPOCH_IDX: self.epochs_done}
        return {**(info or {}), **known}

    @contextmanager
    def _profiled(self, profile: bool, name: str) -> Iterator[None]:
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

    # --- what else a driver asks for

    def models(self, to_cpu: bool = False) -> list[nn.Module]:
        """Without their wrappers; `to_cpu`: copies there, where they are on a GPU."""
        models = self.operator._models
        return [deepcopy(model).cpu() for model in models] if to_cpu and self._settings.use_gpu else models

    def update_scheduler(self, metric: Any) -> None:
        for scheduler in self.operator._schedulers:
            scheduler.step(metric)

    def apply(self, function: Callable[[], Any]) -> Any:
        return function()

    def apply_operator(self, function: Callable[[TrainingOperator], Any]) -> Any:
        return function(self.operator)

    def close(self) -> None:
        """Ends loader processes."""
        self._training.close()
        self._validation.close()

    # --- states

    def state_dict(self) -> dict[str, Any]:
        """See hpc_det.sgd.rank.state; on the CPU. What is there already is no copy."""
        state: dict[str, Any] = on_cpu(state_of(self.operator, self._training.begun))
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The pass that was open is over: the next `train()` begins one. Raises UsageError for a state that differs."""
        load_state(state, self.operator)
        self._training.restart(state["epoch"])

    def level(self) -> None:
        """To be done before a snapshot: then `shared` of any rank will do. Collective."""
        share_buffers(self.operator)

    def shared(self) -> dict[str, Any]:
        """What all ranks have in common, for `restore`. Tensors are the live ones: save them before the next call."""
        return {
            "state": state_of(self.operator, self._training.begun),
            "modes": modes(self.operator._models),
            "global_step": self.operator.global_step,
            "size": self._place.size,
            "training": self._training.position(),
            "validation": self._validation.position(),
        }

    def own(self) -> dict[str, Any]:
        """What this rank has alone, for `restore`, to be taken with `shared`. Collective."""
        return {
            "rng": rng_state(),
            "training": self._training.own(),
            "validation": self._validation.own(),
            "buffers": on_cpu(own_buffers(self.operator)),
            **self._own_operator(),
        }

    def _own_operator(self) -> dict[str, Any]:
        """The operator's state, unless all ranks have the same."""
        if not self._place.is_distributed or type(self.operator).state_dict is TrainingOperator.state_dict:
            return {}
        state = self.operator.state_dict()
        digest = _digest(state)
        of_all = [torch.empty_like(digest) for _ in range(self._place.size)]
        dist.all_gather(of_all, digest)
        return {} if all(torch.equal(digest, other) for other in of_all) else {"operator": on_cpu(state)}

    def restore(self, shared: dict[str, Any] | None, own: dict[str, Any] | None) -> None:
        """Collective. `shared` is rank 0's to give; `own` is None on a rank that did not exist at the snapshot.

        On as many ranks as then, the next `train()` or `validate()` does what it would have done then.
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
        else:
            seed_everything(mixed_seed("rank", self._place.rank, self.operator.global_step) % 2**32)

    def _restore_own(self, own: dict[str, Any]) -> None:
        set_own_buffers(self.operator, own["buffers"])
        for name, passes, _ in self._data():
            passes.restore_generators(own[name])
        restore_rng(own["rng"])  # last of all: what came before may draw

    def _data(self) -> list[tuple[str, Passes, Iterable[Any] | None]]:
        return [
            ("training", self._training, self.operator._train_loader),
            ("validation", self._validation, self.operator._validation_loader),
        ]

    def _group(self) -> SealedGroup:
        secret = shared_secret(os.environ) if self._secret is None else self._secret
        return SealedGroup(range(self._place.size), self._place.rank, secret)


def _called(hook: Callable[..., Any], batches: Iterator[Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Only with what the user's override takes: RaySGD has added keywords over time.

    Raises UsageError for anything but a dict of metrics.
    """
    parameters = inspect.signature(hook).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    result = hook(batches, **{name: value for name, value in offered.items() if takes_all or name in parameters})
    if not isinstance(result, Mapping):
        raise UsageError(f"{hook.__qualname__} returned {type(result).__name__}; return a dict of metrics")
    return {name: plain(value) if isinstance(value, torch.Tensor) else on_cpu(value) for name, value in result.items()}


def _digest(state: Any) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(state, file)
    return torch.frombuffer(bytearray(hashlib.sha256(file.getbuffer()).digest()), dtype=torch.uint8)
