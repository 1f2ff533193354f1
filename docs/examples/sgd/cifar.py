"""A small convolutional network on synthetic images of the shape of CIFAR-10: 10 classes, 3 x 32 x 32.

With mixed precision (--fp16), a progress bar (--tqdm), and a learning rate that decreases by epochs.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hpc_det.sgd import BATCH_SIZE, TorchTrainer, TrainingOperator

CLASSES = 10


def images(number, seed):
    """Return images and classes. A class is a pattern of 4 x 4 coloured squares, with noise of equal strength."""
    patterns = torch.randn(CLASSES, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (number,), generator=generator)
    clean = nn.functional.interpolate(patterns, scale_factor=8)[labels]
    return TensorDataset(clean + torch.randn(clean.shape, generator=generator), labels)


def block(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )


class CifarOperator(TrainingOperator):
    def setup(self, config):
        torch.manual_seed(0)
        model = nn.Sequential(
            block(3, 16), block(16, 32), block(32, 64), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9, weight_decay=5e-4)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=config["milestones"], gamma=0.1)
        self.model, self.optimizer, self.criterion, self.scheduler = self.register(
            models=model, optimizers=optimizer, criterion=nn.CrossEntropyLoss(), schedulers=scheduler
        )
        self.register_data(
            train_loader=DataLoader(images(1024, seed=1), config[BATCH_SIZE], shuffle=True, pin_memory=self.use_gpu),
            validation_loader=DataLoader(images(256, seed=2), config[BATCH_SIZE]),
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--fp16", action="store_true")
    parser.add_argument("--tqdm", action="store_true")
    parser.add_argument("--run", help="name of the run; the same command continues it")
    args = parser.parse_args()
    trainer = TorchTrainer(
        training_operator_cls=CifarOperator,
        config={"lr": 0.05, "milestones": [3], BATCH_SIZE: 128},
        num_workers=args.workers,
        use_fp16=args.fp16,
        use_tqdm=args.tqdm,
        scheduler_step_freq="epoch",
        run=args.run,
    )
    for _ in trainer.remaining(args.epochs):
        loss = trainer.train(info={"num_epochs": args.epochs})["train_loss"]
        result = trainer.validate()
        print(f"epoch {trainer.epochs_done}: loss {loss:.3f}, accuracy {result['val_accuracy']:.3f}")
    trainer.shutdown()


if __name__ == "__main__":
    main()
