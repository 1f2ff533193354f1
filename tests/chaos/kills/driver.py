"""A program with a TorchTrainer, which is started again after it was killed: driver.py MAX_RETRIES"""

import sys

import torch

from hpc_det.sgd import TorchTrainer
from tests.sgd.trained import Linear, weights

EPOCHS = 4


def main() -> None:
    with TorchTrainer(training_operator_cls=Linear, num_workers=2, executor="local", run="killed") as trainer:
        for epoch in trainer.remaining(EPOCHS):
            print("epoch", epoch, trainer.train(max_retries=int(sys.argv[1]))["train_loss"].hex(), flush=True)
            trainer.validate()
        bits = torch.cat([value.flatten() for value in weights(trainer).values()])
        print("weights", bits.numpy().tobytes().hex(), flush=True)


if __name__ == "__main__":
    main()
