"""A program with a TorchTrainer: python driver.py RUN EPOCHS [KILLED_AFTER]. It prints the loss of each epoch."""

import os
import signal
import sys

from line import LineOperator

from hpc_det.sgd import TorchTrainer

if __name__ == "__main__":
    run, epochs, *killed_after = sys.argv[1:]
    trainer = TorchTrainer(training_operator_cls=LineOperator, num_workers=1, use_gpu=False, run=run)
    for epoch in trainer.remaining(int(epochs)):
        print(epoch, trainer.train()["train_loss"], flush=True)
        if killed_after and epoch == int(killed_after[0]):
            os.kill(os.getpid(), signal.SIGKILL)
    trainer.shutdown()
