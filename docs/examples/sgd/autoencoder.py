"""An autoencoder with two models and its own train_epoch, which clips gradients and defines metrics.

It encodes points on a curve in 16 dimensions as 2 numbers, and decodes them.
"""

import argparse
import itertools

import torch
from torch import nn
from torch.utils.data import DataLoader

from hpc_det.sgd import BATCH_SIZE, AverageMeterCollection, TorchTrainer, TrainingOperator


def curve(number, seed):
    """Return waves of random phase and height: number x 16."""
    phase, height = torch.rand(2, number, 1, generator=torch.Generator().manual_seed(seed))
    return (height + 0.5) * torch.sin(torch.linspace(0, 6, 16) + 6.28 * phase)


def network(*widths):
    layers = [layer for pair in itertools.pairwise(widths) for layer in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


class AutoencoderOperator(TrainingOperator):
    def setup(self, config):
        torch.manual_seed(0)
        models = network(16, 32, 2), network(2, 32, 16)
        optimizers = [torch.optim.Adam(model.parameters(), lr=config["lr"]) for model in models]
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95) for optimizer in optimizers]
        (self.encoder, self.decoder), self.optimizers, self.schedulers = self.register(
            models=models, optimizers=optimizers, schedulers=schedulers
        )
        self.register_data(
            train_loader=DataLoader(curve(2048, seed=1), config[BATCH_SIZE], shuffle=True),
            validation_loader=DataLoader(curve(512, seed=2), config[BATCH_SIZE]),
        )

    def train_epoch(self, iterator, info):
        meters = AverageMeterCollection()
        self.encoder.train()
        self.decoder.train()
        for points in iterator:
            points = points.to(self.device)
            with self.autocast():  # mixed precision, if the trainer enables it
                loss = nn.functional.mse_loss(self.decoder(self.encoder(points)), points)
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            self.backward(loss)
            for model, optimizer in zip((self.encoder, self.decoder), self.optimizers, strict=True):
                self.unscale(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                self.step(optimizer)
            meters.update({"error": loss, "num_samples": len(points)})
        for scheduler in self.schedulers:
            scheduler.step()
        return meters.summary()

    def validate_batch(self, batch, batch_info):
        points = batch.to(self.device)
        error = nn.functional.mse_loss(self.decoder(self.encoder(points)), points)
        return {"error": error, "num_samples": len(points)}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--fp16", action="store_true")
    args = parser.parse_args()
    trainer = TorchTrainer(
        training_operator_cls=AutoencoderOperator,
        config={"lr": 0.01, BATCH_SIZE: 64},
        num_workers=args.workers,
        use_fp16=args.fp16,
        scheduler_step_freq="manual",
    )
    for _ in trainer.remaining(args.epochs):
        trained, validated = trainer.train(), trainer.validate()
        print(f"epoch {trainer.epochs_done}: error {trained['error']:.4f}, validation {validated['error']:.4f}")
    trainer.shutdown()


if __name__ == "__main__":
    main()
