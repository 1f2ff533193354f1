"""A plain training loop as a user writes it; a test stops it at given batches."""

import random
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import hpc_det.core


class Numbers(Dataset):
    """Records whose noise is drawn from the global generators, also in loader workers."""

    def __len__(self):
        return 48

    def __getitem__(self, number):
        inputs = torch.full((4,), number / 48) + 0.1 * torch.randn(4) + 0.1 * random.random()
        return inputs, inputs.sum()[None]


def waits(core):
    """Wait here until this rank has received a stop request. The ranks agree on the stop in later batches."""
    while not core._run.stop.noticed:
        time.sleep(0.05)


def main():
    with hpc_det.core.init() as core:
        gang = core.distributed
        model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=core.hparams["lr"])
        if gang.size > 1:
            model = nn.parallel.DistributedDataParallel(model)
        seen = {"sums": []}
        core.track(model=model, optimizer=optimizer)
        core.track(seen=seen, per_rank=True)
        numbers = Numbers()
        shared = DistributedSampler(numbers, gang.size, gang.rank) if gang.size > 1 else None
        loader = DataLoader(
            numbers,
            batch_size=2,
            sampler=shared,
            shuffle=shared is None,
            num_workers=core.hparams["workers"],
            persistent_workers=core.hparams["workers"] > 0,
        )
        for operation in core.search:
            for inputs, targets in core.batches(loader, until=operation):
                loss = (model(inputs) - targets + 0.1 * np.random.random()).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                seen["sums"].append(float(inputs.sum()))
                core.report(core.step, {"loss": loss.detach(), "sum": seen["sums"][-1]})
                if core.step in core.hparams["waits_at"][core.info.attempt - 1 : core.info.attempt]:
                    waits(core)
            error = sum(parameter.detach().abs().sum() for parameter in model.parameters()) * core.hparams["lr"]
            core.report(core.step, {"error": error}, group="validation")
        print(f"left at batch {core.step}: {core.should_stop().reason}", flush=True)


if __name__ == "__main__":
    main()
