"""LoRA (Hu et al., 2021): a frozen model learns two small matrices beside each chosen linear layer."""

from collections import Counter

import torch
from torch import nn


class Adapted(nn.Module):
    """A frozen linear layer, and beside it the product of two matrices of rank `rank`, which starts as zero."""

    def __init__(self, layer: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.layer, self.scale = layer, scale
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        change = self.scale * self.up(self.down(states.float()))  # the matrices are float32, whatever the layer is
        return self.layer(states) + change.to(states)

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """Return the layer with the product added to its weights."""
        self.layer.weight += (self.scale * self.up.weight @ self.down.weight).to(self.layer.weight)
        return self.layer


def adapt(model: nn.Module, layers: list[str], rank: int, scale: float) -> None:
    """Freeze the model, and add trained matrices to its linear layers with these names.

    The model's `state_dict` then contains these matrices alone: checkpoints have megabytes instead of gigabytes.
    """
    model.requires_grad_(False)
    linear = {path: layer for path, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    known = {path.rpartition(".")[2] for path in linear}
    if unknown := sorted({*layers} - known):
        raise ValueError(f"layers: {unknown} are not linear layers of the model, which has {sorted(known)}")
    uses = Counter(weight for _, weight in model.named_parameters(remove_duplicate=False))
    for path, layer in linear.items():
        if path.rpartition(".")[2] in layers:
            if uses[layer.weight] > 1:  # `merge` would change the other layer, too
                raise ValueError(f"layers: {path} shares its weights with another layer; leave it out")
            model.set_submodule(path, Adapted(layer, rank, scale))
    model.register_state_dict_post_hook(_leave_out_frozen)
    model.register_load_state_dict_post_hook(_expect_no_frozen)


def merge(model: nn.Module) -> None:
    """Replace each adapted layer by a linear layer with the same output. The state then contains all weights again."""
    for path, module in [*model.named_modules()]:
        if isinstance(module, Adapted):
            model.set_submodule(path, module.merged())


def _trained(model: nn.Module) -> list[str]:
    return [name for name, weight in model.named_parameters() if weight.requires_grad]


def _leave_out_frozen(model: nn.Module, state: dict, prefix: str, *rest) -> None:
    if trained := _trained(model):
        for name in [*state]:
            if name.startswith(prefix) and name.removeprefix(prefix) not in trained:
                del state[name]


def _expect_no_frozen(model: nn.Module, found) -> None:
    found.missing_keys[:] = [name for name in found.missing_keys if name.endswith(tuple(_trained(model)))]
