"""A training with everything that a checkpoint in a wrong place would miss; see test_lightning."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader

import hpc_det.core
from hpc_det.core import Core
from hpc_det.integrations.lightning import HpcDetCallback, HpcDetEnvironment, ResumableSampler
from tests.integrations.fabric_training import train_with_fabric
from tests.integrations.training import INIT, PASSES, Numbers, fingerprint, network, stop_now, wait_for_stop, write

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Model(pl.LightningModule):
    def __init__(self, core: Core, stop_at: int | None, waits_at: int | None) -> None:
        super().__init__()
        self.net = network()
        self.core, self.stop_at, self.waits_at = core, stop_at, waits_at
        self.register_buffer("average", torch.zeros(()))
        self.batches = core.step

    def training_step(self, batch: Any, index: int) -> Any:
        features, target = batch
        loss = (self.net(features) - target).square().mean()
        self.log("loss", loss)
        self.batches += 1
        if self.batches == self.stop_at:
            stop_now(self.core)
        if self.batches == self.waits_at and self.core.info.attempt == 1:
            wait_for_stop(self.core)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:  # after the hooks of all callbacks
        self.average.mul_(0.9).add_(0.1 * next(self.net.parameters()).detach().mean())

    def validation_step(self, batch: Any, index: int) -> None:
        features, target = batch
        self.log("val_loss", (self.net(features) - target).square().mean() + 0 * torch.rand(()), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.core.hparams["lr"])
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.99)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


class Hooks(Callback):
    """The hooks of all attempts, in order."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self.seen)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = list(state_dict["seen"])

    def on_train_batch_start(self, trainer: pl.Trainer, model: Any, batch: Any, index: int) -> None:
        self.seen.append(f"start {index} {float(batch[0].sum())}")

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append("end")

    def on_train_epoch_start(self, *_: Any) -> None:
        self.seen.append("pass start")

    def on_train_epoch_end(self, *_: Any) -> None:
        self.seen.append("pass end")

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.seen.append("validation")


def main(result: str, **options: Any) -> None:
    write(result, train(options))


def train(options: dict[str, Any]) -> Any:
    with hpc_det.core.init(**INIT) as core:
        if options.get("fabric"):
            return train_with_fabric(core, options)
        callback, hooks = HpcDetCallback(core), Hooks()
        stopping = EarlyStopping("val_loss", patience=99)
        best = ModelCheckpoint(Path(os.environ["HPC_DET_ROOT"]) / "best", monitor="val_loss", save_top_k=1)
        ranks = core.distributed
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=ranks.local_size,
            num_nodes=ranks.nodes,
            plugins=[HpcDetEnvironment(core)],
            callbacks=[hooks, stopping, best, callback],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            log_every_n_steps=1,
            **{"max_epochs": PASSES, **options.get("trainer", {})},
        )
        model = Model(core, options.get("stop_at"), options.get("waits_at"))
        loader = DataLoader(
            Numbers(),
            batch_size=8 // ranks.size,
            sampler=ResumableSampler(core, Numbers()),
            num_workers=options.get("workers", 0),
        )
        trainer.fit(model, loader, DataLoader(Numbers(), batch_size=48), ckpt_path=callback.ckpt_path)
        counters = trainer.fit_loop.epoch_loop
        return {
            "step": core.step,
            "stop": core.should_stop().reason,
            "state": fingerprint(model.state_dict(), *(each.state_dict() for each in trainer.optimizers)),
            "schedule": fingerprint(trainer.lr_scheduler_configs[0].scheduler.state_dict()),
            "hooks": [] if ranks.rank else hooks.seen,  # Lightning restores the callbacks of rank 0 on all ranks
            "stopping": stopping.state_dict()["wait_count"],
            "random": float(torch.rand(())),
            "counters": [counters.global_step, counters.total_batch_idx, counters._batches_that_stepped],
            "best": Path(best.best_model_path).exists(),
        }
