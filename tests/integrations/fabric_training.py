"""A plain loop with Fabric; see test_lightning."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, DistributedSampler

from hpc_det.core import Core
from hpc_det.integrations.lightning import HpcDetEnvironment
from tests.integrations.training import PASSES, Numbers, fingerprint, network, stop_now


def train_with_fabric(core: Core, options: dict[str, Any]) -> Any:
    ranks = core.distributed
    fabric = Fabric(
        accelerator="cpu", devices=ranks.local_size, num_nodes=ranks.nodes, plugins=[HpcDetEnvironment(core)]
    )
    fabric.launch()
    plain = network()
    model, optimizer = fabric.setup(plain, torch.optim.Adam(plain.parameters(), lr=core.hparams["lr"]))
    core.track(model=model, optimizer=optimizer)
    sampler: DistributedSampler[int] = DistributedSampler(Numbers(), ranks.size, ranks.rank)
    loader = DataLoader(Numbers(), batch_size=8 // ranks.size, sampler=sampler)
    for _ in core.epochs(PASSES):
        for features, target in core.batches(loader):
            loss = (model(features) - target).square().mean()
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            core.report(core.step, {"loss": loss})
            if core.step == options.get("stop_at"):
                stop_now(core)
    state = fingerprint(model.state_dict(), optimizer.state_dict())
    return {"step": core.step, "stop": core.should_stop().reason, "state": state, "random": float(torch.rand(()))}
