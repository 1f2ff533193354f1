"""Operators built from creator functions of the config, the RaySGD interface that preceded `setup`."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from hpc_det.errors import HpcDetError, shown
from hpc_det.sgd.operator.base import BaseOperator
from hpc_det.sgd.operator.options import BadArgument

_LOSS: type[torch.nn.Module] = torch.nn.MSELoss.__base__ or torch.nn.Module
"""The class of all losses of torch, which has no public name."""
Creator = Callable[..., Any]


@dataclass(frozen=True)
class Creators:
    """The functions that create the components of an operator.

    Raises BadArgument, a ValueError, for a creator that is not callable.
    """

    model_creator: Creator
    """`model_creator(config)` returns a model, or a tuple or list of models."""
    optimizer_creator: Creator
    """`optimizer_creator(models, config)` returns one or more optimizers; `models` is what model_creator returned."""
    data_creator: Creator | None
    """`data_creator(config)` returns a training loader, or a tuple or list of a training and a validation loader."""
    loss_creator: Creator | None
    """A loss class of torch.nn, which is called without arguments, or `loss_creator(config)` returns the criterion."""
    scheduler_creator: Creator | None
    """`scheduler_creator(optimizers, config)` returns one or more schedulers."""
    serialize_data_creation: bool
    """Whether data_creator runs on one rank of a node at a time, so that only the first one downloads the data."""

    def __post_init__(self) -> None:
        given = {field.name: getattr(self, field.name) for field in fields(self) if field.name.endswith("_creator")}
        needed = ("model_creator", "optimizer_creator")
        if problems := [
            f"from_creators: {name} is {shown(value)}, which is not callable; give a function"
            for name, value in given.items()
            if not callable(value) and (value is not None or name in needed)
        ]:
            raise BadArgument(problems)

    def loaders(self, config: dict[str, Any]) -> tuple[Any, Any]:
        """Return the training and the validation loader; None for one that data_creator does not create."""
        if self.data_creator is None:
            return None, None
        with _one_rank_at_a_time() if self.serialize_data_creation else nullcontext():
            given = self.data_creator(config)
        loaders = list(given) if isinstance(given, (tuple, list)) else [given]
        if given is None or len(loaders) not in (1, 2):
            raise BadArgument(
                f"data_creator returned {shown(given)}; return a training loader, or a tuple of a training and a "
                f"validation loader"
            )
        return loaders[0], loaders[1] if len(loaders) == 2 else None

    def criterion(self, config: dict[str, Any]) -> Any:
        """Return the criterion, or None without a loss_creator."""
        if self.loss_creator is None:
            return None
        # RaySGD's rule: a loss class is instantiated without arguments, any other creator is called with the config.
        is_loss = isinstance(self.loss_creator, type) and issubclass(self.loss_creator, _LOSS)
        return self.loss_creator() if is_loss else self.loss_creator(config)


class CreatorSetup(BaseOperator):
    """A mixin whose `setup` registers what creators return; the default loops use the first of each kind."""

    _creators: Creators
    """Set by the class that TrainingOperator.from_creators returns."""

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
        """All registered models, wrapped in DDP if there are several ranks."""
        return list(self._wrapped)

    @property
    def model(self) -> Any:
        """The first registered model."""
        return self._wrapped[0]

    @property
    def optimizers(self) -> list[Any]:
        """All registered optimizers."""
        return list(self._optimizers)

    @property
    def optimizer(self) -> Any:
        """The first registered optimizer."""
        return self._optimizers[0]

    @property
    def schedulers(self) -> list[Any]:
        """All registered schedulers."""
        return list(self._schedulers)

    @property
    def scheduler(self) -> Any:
        """The first registered scheduler, or None."""
        return self._schedulers[0] if self._schedulers else None

    @property
    def criterion(self) -> Any:
        """The registered criterion, or None."""
        return self._criterion


@contextmanager
def _one_rank_at_a_time() -> Iterator[None]:
    """Hold a file lock in the `with` block, so that one rank of this user on this node is inside it at a time."""
    # The user id keeps the locks of different users apart; O_NOFOLLOW rejects a link that another user left in /tmp.
    path = Path(tempfile.gettempdir()) / f"hpc_det-{os.geteuid()}.data.lock"
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise HpcDetError(
            f"{path}: {error.strerror}; the ranks of a node lock this file so that one at a time creates data: set "
            f"TMPDIR to a folder of yours on this node, or use from_creators(..., serialize_data_creation=False)"
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)  # closing alone keeps the lock if a child that was forked meanwhile has the fd
        os.close(lock)
