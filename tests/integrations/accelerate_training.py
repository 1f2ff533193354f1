"""A plain loop with Accelerate; see test_accelerate."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader

import hpc_det.core
from hpc_det.core import Core
from hpc_det.integrations.accelerate import track
from tests.integrations.training import INIT, PASSES, Numbers, fingerprint, network, stop_now, write


def main(result: str, **options: Any) -> None:
    write(result, train(options))


def train(options: dict[str, Any]) -> Any:
    saves_state, accumulate = options.get("saves_state", False), options.get("accumulate", 1)
    with hpc_det.core.init(**INIT) as core:
        accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=accumulate,
            dataloader_config=DataLoaderConfiguration(**options.get("loader", {})),
        )
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=core.hparams["lr"])
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)
        batch_size = 8 // core.distributed.size
        loader = DataLoader(Numbers(), batch_size=batch_size, shuffle=True, num_workers=options.get("workers", 0))
        model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
        if not saves_state:
            track(core, accelerator)
        elif core.latest_checkpoint:
            accelerator.load_state(str(core.latest_checkpoint / "accelerate"))
        seen: dict[str, list[float]] = {"records": []}
        if not saves_state:
            core.track(seen=seen, per_rank=True)
        for _ in core.epochs(PASSES):
            for features, target in core.batches(loader, accumulate=1 if options.get("forgets") else accumulate):
                with accelerator.accumulate(model):
                    loss = (model(features) - target).square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                seen["records"].append(float(features.sum()))
                if core.step == options.get("stop_at"):
                    stop_now(core)
            if saves_state and core.should_stop():
                _save_state(core, accelerator)
        return {
            "step": core.step,
            "stop": core.should_stop().reason,
            "state": fingerprint(accelerator.unwrap_model(model).state_dict(), optimizer.state_dict()),
            "schedule": fingerprint(scheduler.state_dict()),
            "seen": [] if saves_state else seen["records"],
            "random": float(torch.rand(())),
        }


def _save_state(core: Core, accelerator: Accelerator) -> None:
    with core.checkpoint() as folder:
        accelerator.save_state(str(folder / "accelerate"))
