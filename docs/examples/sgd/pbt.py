"""Population-based training: every few epochs the worst trials continue from a copy of the best, with changed
hyperparameters. With --kills, random processes of trials are killed, and the search continues.
"""

import argparse
import os
import random
import signal
import threading
from contextlib import contextmanager, suppress

from linear import LineOperator

from hpc_det.node.process import descendants
from hpc_det.sgd import BATCH_SIZE, TorchTrainer
from hpc_det.sgd.tune import loguniform, pbt, tune_run

KILL_EVERY_S = 3


class PopulationOperator(LineOperator):
    """Trains with the learning rate that the population has given to this trial.

    A checkpoint contains the learning rate of the trial that saved it, which the scheduler has lowered since.
    """

    def state_dict(self):
        return {"lr": self.config["lr"]}

    def load_state_dict(self, state):
        for group in self.optimizer.param_groups:
            group["lr"] *= self.config["lr"] / state["lr"]


@contextmanager
def random_kills(number):
    """Kill random descendants of this process: trials, their agents and their ranks."""
    killed, is_over = [], threading.Event()

    def kill():
        while len(killed) < number and not is_over.wait(KILL_EVERY_S):
            with suppress(ProcessLookupError, IndexError):  # the process may have exited before
                os.kill(pid := random.choice(descendants(os.getpid())), signal.SIGKILL)
                killed.append(pid)

    thread = threading.Thread(target=kill)
    thread.start()
    yield killed
    is_over.set()
    thread.join()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--kills", type=int, default=0)
    args = parser.parse_args()
    trainable = TorchTrainer.as_trainable(
        training_operator_cls=PopulationOperator, scheduler_step_freq="epoch", config={BATCH_SIZE: 64}
    )
    with random_kills(args.kills) as killed:
        analysis = tune_run(
            trainable,
            config={"lr": loguniform(0.0001, 0.1)},
            num_samples=args.trials,
            searcher=pbt(interval=3, quantile=0.34),
            stop={"training_iteration": args.epochs},
            metric="val_loss",
            mode="min",
            max_failures=100,
            seed=1,
        )
    for row in analysis.rows():
        epochs, loss = row["training_iteration"], row["val_loss"]
        print(f"trial {row['trial']}: {row['status']} after {epochs} epochs, loss {loss:.4f}")
    print(f"best: lr {analysis.best_config['lr']:.4f}; {len(killed)} processes were killed")


if __name__ == "__main__":
    main()
