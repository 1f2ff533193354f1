"""A small DCGAN with two models, two optimizers and its own train_batch.

The images are bright discs of 16 x 16 pixels. The metric is the distance between the mean real and generated images.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader

from hpc_det.sgd import BATCH_SIZE, TorchTrainer, TrainingOperator

NOISE, WIDTH = 16, 8


def discs(number, seed):
    """Return images 1 x 16 x 16 with values in -1..1: discs near the middle with random centre and radius."""
    generator = torch.Generator().manual_seed(seed)
    x, y, radius = torch.rand(3, number, 1, 1, generator=generator) * 2
    rows, columns = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    distance = torch.hypot(rows - 6.5 - x, columns - 6.5 - y)
    return torch.tanh(4 + radius - distance).unsqueeze(1)


def generator():
    return nn.Sequential(
        nn.ConvTranspose2d(NOISE, 2 * WIDTH, 4, bias=False),
        nn.BatchNorm2d(2 * WIDTH),
        nn.ReLU(),
        nn.ConvTranspose2d(2 * WIDTH, WIDTH, 4, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(WIDTH),
        nn.ReLU(),
        nn.ConvTranspose2d(WIDTH, 1, 4, stride=2, padding=1),
        nn.Tanh(),
    )


def discriminator():
    return nn.Sequential(
        nn.Conv2d(1, WIDTH, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(WIDTH, 2 * WIDTH, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(2 * WIDTH * 4 * 4, 1),
    )


class GanOperator(TrainingOperator):
    def setup(self, config):
        torch.manual_seed(0)
        models = generator(), discriminator()
        optimizers = [torch.optim.Adam(model.parameters(), lr=config["lr"], betas=(0.5, 0.9)) for model in models]
        (self.generator, self.discriminator), (self.optimizer_g, self.optimizer_d), self.criterion = self.register(
            models=models, optimizers=optimizers, criterion=nn.BCEWithLogitsLoss()
        )
        torch.manual_seed(self.world_rank)  # different noise on each rank
        self.register_data(
            train_loader=DataLoader(discs(512, seed=1), config[BATCH_SIZE], shuffle=True),
            validation_loader=DataLoader(discs(256, seed=2), config[BATCH_SIZE]),
        )

    def train_batch(self, batch, batch_info):
        real = batch.to(self.device)
        fake = self.generated(len(real))

        verdict = self.discriminator(fake)
        generator_loss = self.criterion(verdict, torch.ones_like(verdict))
        self.optimizer_g.zero_grad()
        self.backward(generator_loss)
        self.step(self.optimizer_g)

        verdict = self.discriminator(torch.cat([real, fake.detach()]))
        truth = torch.cat([torch.ones(len(real), 1), torch.zeros(len(fake), 1)]).to(verdict)
        discriminator_loss = self.criterion(verdict, truth)
        self.optimizer_d.zero_grad()  # also deletes the gradients of the generator's loss
        self.backward(discriminator_loss)
        self.step(self.optimizer_d)
        return {"loss_g": generator_loss, "loss_d": discriminator_loss, "num_samples": len(real)}

    def validate_batch(self, batch, batch_info):
        real = batch.to(self.device)
        distance = (self.generated(len(real)).mean(dim=0) - real.mean(dim=0)).abs().mean()
        return {"distance": distance, "num_samples": len(real)}

    def generated(self, number):
        return self.generator(torch.randn(number, NOISE, 1, 1, device=self.device))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=8)
    args = parser.parse_args()
    trainer = TorchTrainer(
        training_operator_cls=GanOperator, config={"lr": 0.005, BATCH_SIZE: 64}, num_workers=args.workers
    )
    for _ in trainer.remaining(args.epochs):
        trained = trainer.train()
        distance = trainer.validate()["distance"]
        print(f"epoch {trainer.epochs_done}: G {trained['loss_g']:.3f}, D {trained['loss_d']:.3f}, {distance:.3f} away")
    trained_generator, _ = trainer.get_model()
    images = trained_generator.eval()(torch.randn(4, NOISE, 1, 1))
    print(f"{len(images)} images of {tuple(images.shape[1:])}")
    trainer.shutdown()


if __name__ == "__main__":
    main()
