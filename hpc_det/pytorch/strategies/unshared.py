"""Parameters whose gradients ranks do not exchange, since nothing of their model was trained when it was wrapped."""

from __future__ import annotations

import torch

from hpc_det.errors import UsageError
from hpc_det.pytorch.state.shards import is_sharded_tensor
from hpc_det.pytorch.strategies.modes import shown_names


class Unshared:
    """DDP refuses a model of which nothing is trained; thawed later, each rank would train a model of its own."""

    def __init__(self, wrapped_by: str) -> None:
        """`wrapped_by`: the method that takes models."""
        self._wrapped_by = wrapped_by
        self._models: list[torch.nn.Module] = []
        self._parameters: list[torch.nn.Parameter] = []

    def add(self, model: torch.nn.Module) -> None:
        """A model outside DDP, of a gang of several ranks."""
        self._models.append(model)
        self._parameters += [parameter for _, parameter in _whole(model)]

    def watch(self, optimizer: object) -> None:
        """Before each of its steps. Nothing for one that is not torch's."""
        if isinstance(optimizer, torch.optim.Optimizer):
            optimizer.register_step_pre_hook(lambda *_: self.check())

    def check(self) -> None:
        """Raises UsageError where one of them has a gradient, which is of this rank's batch alone."""
        if not any(parameter.grad is not None for parameter in self._parameters):
            return
        for model in self._models:
            if names := [name for name, parameter in _whole(model) if parameter.grad is not None]:
                raise UsageError(
                    f"{len(names)} parameters of {type(model).__name__} ({shown_names(names)}) have gradients that "
                    f"ranks do not exchange: they were frozen at {self._wrapped_by}, with nothing else of the model "
                    f"in DDP, and thawed later; call {self._wrapped_by} first, and freeze the model after it"
                )


def _whole(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if not is_sharded_tensor(parameter)]
