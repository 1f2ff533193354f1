"""A search for the learning rate of linear.py, with a trainer for each trial: a grid, or random rates with ASHA, which
stops bad trials early.
"""

import argparse

from linear import LineOperator

from hpc_det.sgd import BATCH_SIZE, TorchTrainer
from hpc_det.sgd.tune import asha, grid_search, loguniform, tune_run


def grid(trainable, args):
    return tune_run(
        trainable,
        config={"lr": grid_search([0.0001, 0.001, 0.01, 0.1])},
        stop={"training_iteration": 3},
        metric="val_loss",
        mode="min",
        run=args.run,
    )


def by_asha(trainable, args):
    return tune_run(
        trainable,
        config={"lr": loguniform(0.0001, 0.1)},
        num_samples=args.trials,
        searcher=asha(num_rungs=2, divisor=3, stop_once=True),
        stop={"training_iteration": 6},
        metric="val_loss",
        mode="min",
        run=args.run,
        seed=1,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("search", choices=("grid", "asha"))
    parser.add_argument("--workers", type=int, default=1, help="workers of each trial")
    parser.add_argument("--trials", type=int, default=6, help="trials of asha")
    parser.add_argument("--run", help="name of the run; the same command continues it")
    args = parser.parse_args()
    trainable = TorchTrainer.as_trainable(
        training_operator_cls=LineOperator,
        num_workers=args.workers,
        scheduler_step_freq="epoch",
        config={BATCH_SIZE: 64},
    )
    analysis = (grid if args.search == "grid" else by_asha)(trainable, args)
    for row in analysis.rows():
        print(
            f"trial {row['trial']}: {row['status']} after {row['training_iteration']} epochs, "
            f"lr {row['config/lr']:.4f}, loss {row['val_loss']:.4f}"
        )
    print(f"best: lr {analysis.best_config['lr']:.4f}")


if __name__ == "__main__":
    main()
