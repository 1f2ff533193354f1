"""A plain training loop on handwritten digits: 1797 images of 8 x 8, shipped with scikit-learn.

Because of the lines with `core`, it stops, saves, resumes and reports as a trial class does.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hpc_det.core


def digits(*, training: bool) -> TensorDataset:
    """Return pairs (64 pixels in 0..1, digit). Every fifth image is for validation."""
    data = load_digits()
    chosen = (torch.arange(len(data.target)) % 5 != 0) == training
    return TensorDataset(torch.tensor(data.data, dtype=torch.float32)[chosen] / 16, torch.tensor(data.target)[chosen])


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset) -> float:
    model.eval()
    images, labels = data.tensors
    correct = model(images).argmax(dim=1) == labels
    model.train()
    return correct.float().mean().item()


def main() -> None:
    with hpc_det.core.init(hparams={"learning_rate": 0.05, "dropout": 0.25, "epochs": 5}) as core:
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(core.hparams["dropout"]), nn.Linear(64, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=core.hparams["learning_rate"], momentum=0.9)
        core.track(model=model, optimizer=optimizer)
        loader = DataLoader(digits(training=True), batch_size=64, shuffle=True)
        for _ in core.epochs(core.hparams["epochs"]):
            for images, labels in core.batches(loader):
                loss = nn.functional.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                core.report(core.step, {"loss": loss})
            core.report(core.step, {"accuracy": accuracy(model, digits(training=False))}, group="validation")


if __name__ == "__main__":
    main()
