"""Operators made of functions of the config, as RaySGD had them before it had `setup`."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch.nn.modules.loss import _Loss

from hpc_det.errors import HpcDetError, shown
from hpc_det.sgd.operator.base import BaseOperator
from hpc_det.sgd.operator.options import BadArgument

Creator = Callable[..., Any]


@dataclass(frozen=True)
class Creators:
    """Raises BadArgument, a ValueError, for one that cannot be called."""

    model_creator: Creator
    """(config) -> a model, or a tuple or list of them."""
    optimizer_creator: Creator
    """(models, config), with models as they were given -> one or more optimizers."""
    data_creator: Creator | None
    """(config) -> a loader to train on, or a sequence of that and of one to validate on."""
    loss_creator: Creator | None
    """A class of torch's losses, or (config) -> the criterion."""
    scheduler_creator: Creator | None
    """(optimizers, config) -> one or more schedulers."""
    serialize_data_creation: bool
    """Whether the ranks of a node create data one after the other: the first downloads what the others find."""

    def __post_init__(self) -> None:
        given = {field.name: getattr(self, field.name) for field in fields(self) if field.name.endswith("_creator")}
        needed = ("model_creator", "optimizer_creator")
        if problems := [
            f"from_creators: {name} is {shown(value)}; give a function"
            for name, value in given.items()
            if not callable(value) and (value is not None or name in needed)
        ]:
            raise BadArgument(problems)

    def loaders(self, config: dict[str, Any]) -> tuple[Any, Any]:
        """For training and for validation; None without."""
        if self.data_creator is None:
            return None, None
        with _one_rank_at_a_time() if self.serialize_data_creation else nullcontext():
            given = self.data_creator(config)
        loaders = list(given) if isinstance(given, (tuple, list)) else [given]
        if given is None or len(loaders) not in (1, 2):
            raise BadArgument(
                f"data_creator returned {shown(given)}; return a loader, or one to train and one to validate"
            )
        return loaders[0], loaders[1] if len(loaders) == 2 else None

    def criterion(self, config: dict[str, Any]) -> Any:
        if self.loss_creator is None:
            return None
        is_loss = isinstance(self.loss_creator, type) and issubclass(self.loss_creator, _Loss)
        return self.loss_creator() if is_loss else self.loss_creator(config)


class CreatorSetup(BaseOperator):
    """`setup` by creators; what the default loops use is the first of each kind."""

    _creators: Creators

    def setup(self, config: dict[str, Any]) -> None:
        make = self._creators
        train_loader, validation_loader = make.loaders(config)
        models = make.model_creator(config)
        optimizers = make.optimizer_creator(models, config)
        schedulers = make.scheduler_creator(optimizers, config) if make.scheduler_creator else None
        self.register(models=models, optimizers=optimizers, criterion=make.criterion(config), schedulers=schedulers)
        self.register_data(train_loader=train_loader, validation_loader=validation_loader)

    @property
    def models(self) -> list[Any]:
        return list(self._wrapped)

    @property
    def model(self) -> Any:
        return self._wrapped[0]

    @property
    def optimizers(self) -> list[Any]:
        return list(self._optimizers)

    @property
    def optimizer(self) -> Any:
        return self._optimizers[0]

    @property
    def schedulers(self) -> list[Any]:
        return list(self._schedulers)

    @property
    def scheduler(self) -> Any:
        """None without."""
        return self._schedulers[0] if self._schedulers else None

    @property
    def criterion(self) -> Any:
        """None without."""
        return self._criterion


@contextmanager
def _one_rank_at_a_time() -> Iterator[None]:
    """On this node, and of this user."""
    path = Path(tempfile.gettempdir()) / f"hpc_det-{os.geteuid()}.data.lock"
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise HpcDetError(
            f"{path}: {error.strerror}; ranks that create data one after the other lock this file: set TMPDIR to a "
            f"folder of yours on this node, or use from_creators(..., serialize_data_creation=False)"
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)  # a worker that was forked meanwhile holds the file open, too
        os.close(lock)
