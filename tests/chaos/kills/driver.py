"""A program with a TorchTrainer, which is started again after a kill: driver.py MAX_RETRIES"""

import sys

import torch

from hpc_det.sgd import TorchTrainer
from tests.sgd.trained import Linear, weights

EPOCHS = 12
"""Enough epochs that a snapshot of the second is written, and any process killed with it, before the last starts."""


def main() -> None:
    with TorchTrainer(training_operator_cls=Linear, num_workers=2, executor="local", run="killed") as trainer:
        for _ in trainer.remaining(EPOCHS):
            loss = trainer.train(max_retries=int(sys.argv[1]))["train_loss"]
            print("epoch", trainer.epochs_done, loss.hex(), flush=True)
        print("validated", trainer.validate()["val_loss"].hex(), flush=True)
        bits = torch.cat([value.flatten() for value in weights(trainer).values()])
        print("weights", bits.numpy().tobytes().hex(), flush=True)


if __name__ == "__main__":
    main()
