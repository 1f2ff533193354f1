"""A training function instead of an operator: `fit` calls it on every rank of an elastic gang.

If a rank dies or the size of the gang changes, the function is called again with the last reported checkpoint.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hpc_det.sgd import Checkpoint, fit, get_checkpoint, get_context, prepare_data_loader, prepare_model, report


def train_line(config):
    torch.manual_seed(0)
    x = torch.randn(1000, 1)
    loader = prepare_data_loader(DataLoader(TensorDataset(x, 2 * x + 5), batch_size=20, shuffle=True))
    model = prepare_model(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    done = 0
    if checkpoint := get_checkpoint():
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder, "state.pt"))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["epoch"]
    loader.set_epoch(done)
    for epoch in range(done + 1, config["epochs"] + 1):
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        metrics = {"epoch": epoch, "loss": loss.item(), "ranks": get_context().get_world_size()}
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if get_context().get_world_rank() == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
                torch.save(state, Path(folder, "state.pt"))
                checkpoint = Checkpoint.from_directory(folder)
            report(metrics, checkpoint)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs=2, default=(1, 2), metavar=("FEWEST", "MOST"))
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--run", help="name of the run; the same command continues it")
    args = parser.parse_args()
    result = fit(
        train_line,
        train_loop_config={"lr": 0.1, "epochs": args.epochs},
        num_workers=tuple(args.workers),
        run=args.run,
        num_to_keep=2,
    )
    for metrics in result.metrics_history:
        print(f"epoch {metrics['epoch']} on {metrics['ranks']} ranks: loss {metrics['loss']:.5f}")
    print(f"checkpoint: {result.checkpoint.path}")


if __name__ == "__main__":
    main()
