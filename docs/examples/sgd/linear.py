"""Linear regression of y = 2 x + 5, the first example of RaySGD."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hpc_det.sgd import BATCH_SIZE, TorchTrainer, TrainingOperator


def points(number):
    x = torch.randn(number, 1, generator=torch.Generator().manual_seed(number))
    return TensorDataset(x, 2 * x + 5)


class LineOperator(TrainingOperator):
    def setup(self, config):
        torch.manual_seed(0)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.9)
        self.model, self.optimizer, self.criterion, self.scheduler = self.register(
            models=model, optimizers=optimizer, criterion=nn.MSELoss(), schedulers=scheduler
        )
        batch_size = config[BATCH_SIZE]  # of one worker, since TorchTrainer has divided it
        self.register_data(
            train_loader=DataLoader(points(1000), batch_size, shuffle=True),
            validation_loader=DataLoader(points(400), batch_size),
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    trainer = TorchTrainer(
        training_operator_cls=LineOperator,
        config={"lr": 0.1, BATCH_SIZE: 32},
        num_workers=args.workers,
        scheduler_step_freq="epoch",
    )
    for _ in trainer.remaining(args.epochs):
        loss = trainer.train()["train_loss"]
        print(f"epoch {trainer.epochs_done}: train {loss:.5f}, validation {trainer.validate()['val_loss']:.5f}")
    model = trainer.get_model()
    print(f"weight {model.weight.item():.3f}, bias {model.bias.item():.3f}")
    trainer.shutdown()


if __name__ == "__main__":
    main()
