"""Create small engines of every kind and train them for a few batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule

from hpc_det.distributed.collectives import Distributed
from hpc_det.pytorch.deepspeed.checkpoint_engine import ShardFiles
from hpc_det.pytorch.deepspeed.runtime import prepare

RECORDS, FEATURES = 4096, 8
MICRO = 2


class Net(torch.nn.Module):
    """A module with dropout, a changing buffer, a frozen parameter, and sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(FEATURES, 17)
        self.second = torch.nn.Linear(17, 1)
        self.scale = torch.nn.Parameter(0.5 + torch.rand(3), requires_grad=False)
        self.register_buffer("seen", torch.zeros(()))
        self.seen: torch.Tensor

    def forward(self, records: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        hidden = torch.tanh(self.first(records)) * self.scale.mean()
        return torch.nn.functional.mse_loss(self.second(hidden).float().squeeze(1), wanted.float())


def config(stage: int, *, dtype: str = "fp32", gas: int = 1, micro: int = MICRO, **others: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": gas,
        "zero_optimization": {"stage": stage, **({"stage3_param_persistence_threshold": 100} if stage == 3 else {})},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 0.02}},
        "gradient_clipping": 0.5,
        "steps_per_print": 10**9,
    }
    if dtype != "fp32":
        settings[dtype] = {"enabled": True}
    return {**settings, **others}


def new_engine(
    distributed: Distributed,
    settings: dict[str, Any],
    seed: int = 1,
    net: type[torch.nn.Module] = Net,
    groups: Callable[[Any], list[dict[str, Any]]] | None = None,
) -> Any:
    """Return an engine with ShardFiles, as wrap_model_engine sets it up. With `groups`, the test creates the AdamW."""
    prepare(distributed)
    torch.manual_seed(seed)
    model = net()
    optimizer = torch.optim.AdamW(groups(model)) if groups else None
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    engine.checkpoint_engine = ShardFiles()
    return engine


def new_pipeline(distributed: Distributed, settings: dict[str, Any], stages: int = 2, seed: int = 1) -> Any:
    prepare(distributed)
    torch.manual_seed(seed)
    layers = [
        LayerSpec(torch.nn.Linear, FEATURES, 17),
        LayerSpec(torch.nn.Tanh),
        LayerSpec(torch.nn.Linear, 17, 9),
        LayerSpec(torch.nn.Linear, 9, 1),
    ]
    module = PipelineModule(layers, num_stages=stages, loss_fn=_loss, partition_method="uniform")
    engine, *_ = deepspeed.initialize(model=module, config=settings)
    engine.checkpoint_engine = ShardFiles()
    return engine


def _loss(outputs: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(outputs.float().squeeze(1), wanted.float())


def batches(engine: Any, first: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield this rank's micro batches from global batch `first` on; the global batches do not depend on the ranks."""
    everything = torch.Generator().manual_seed(7)
    records = torch.randn(RECORDS, FEATURES, generator=everything)
    wanted = records.sum(1)
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    size = engine.dp_world_size
    rank = torch.distributed.get_rank() % size
    micro, gas = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    whole = micro * gas * size
    for batch in range(first, RECORDS // whole):
        for i in range(gas):
            start = batch * whole + (i * size + rank) * micro
            yield records[start : start + micro].to(dtype), wanted[start : start + micro]


def train(engine: Any, first: int, count: int) -> list[float]:
    """Train and return the loss of each micro batch on this rank, or of each batch for a pipeline."""
    source = batches(engine, first)
    if hasattr(engine, "num_stages"):
        return [engine.train_batch(source).item() for _ in range(count)]
    losses = []
    for _ in range(count * engine.gradient_accumulation_steps()):
        loss = engine(*next(source))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses
