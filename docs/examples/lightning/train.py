"""A small network on handwritten digits, trained by Lightning's Trainer: a script that also runs without a job."""

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import hpc_det.core
from hpc_det.integrations.lightning import HpcDetCallback, HpcDetEnvironment, ResumableSampler


class Digits(pl.LightningModule):
    def __init__(self, learning_rate: float, dropout: float) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, 10))

    def training_step(self, batch, index):
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        images, labels = batch
        accuracy = (self.net(images).argmax(dim=1) == labels).float().mean()
        self.log("accuracy", accuracy, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


def digits(*, training: bool) -> Dataset:
    """Return pairs (64 pixels in 0..1, digit). Every fifth image is for validation."""
    data = load_digits()
    images, labels = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    chosen = (torch.arange(len(labels)) % 5 != 0) == training
    return TensorDataset(images[chosen], labels[chosen])


def main() -> None:
    with hpc_det.core.init(hparams={"learning_rate": 0.003, "dropout": 0.1, "global_batch_size": 64}) as core:
        ranks, hparams = core.distributed, core.hparams
        callback = HpcDetCallback(core)
        trainer = pl.Trainer(
            devices=ranks.local_size,
            num_nodes=ranks.nodes,
            plugins=[HpcDetEnvironment(core)],
            callbacks=[callback],
            max_epochs=core.config.get("searcher", {}).get("max_length", {}).get("epochs", 3),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            log_every_n_steps=10,
        )
        data, batch_size = digits(training=True), hparams["global_batch_size"] // ranks.size
        trainer.fit(
            Digits(hparams["learning_rate"], hparams["dropout"]),
            DataLoader(data, batch_size, sampler=ResumableSampler(core, data)),
            DataLoader(digits(training=False), 60),
            ckpt_path=callback.ckpt_path,
        )


if __name__ == "__main__":
    main()
