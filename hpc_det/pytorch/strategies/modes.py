"""What of a model the trial or a callback may change on the way, beside its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

_SHOWN = 3


def modes(models: Sequence[torch.nn.Module]) -> dict[str, list[str]]:
    """The parameters that are frozen, the modules in eval mode."""
    return {
        "frozen": [name for name, parameter in named_parameters(models) if not parameter.requires_grad],
        "evaluating": [name for name, module in _modules(models) if not module.training],
    }


def set_modes(models: Sequence[torch.nn.Module], state: Mapping[str, Any]) -> None:
    """As in the `modes` of `state`; everything else is trained."""
    for name, parameter in named_parameters(models):
        parameter.requires_grad_(name not in state["frozen"])
    for name, module in _modules(models):
        module.training = name not in state["evaluating"]


def _modules(models: Sequence[torch.nn.Module]) -> list[tuple[str, torch.nn.Module]]:
    return [(f"{k}.{name}", module) for k, model in enumerate(models) for name, module in model.named_modules()]


def named_parameters(models: Sequence[torch.nn.Module]) -> list[tuple[str, torch.nn.Parameter]]:
    return [
        (f"{k}.{name}", parameter) for k, model in enumerate(models) for name, parameter in model.named_parameters()
    ]


def shown_names(names: Sequence[str]) -> str:
    """The first few of them."""
    return ", ".join([*names[:_SHOWN], *(["..."] if len(names) > _SHOWN else [])])
