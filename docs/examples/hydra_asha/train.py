"""A Hydra app that trains on handwritten digits: alone, in a sweep of Hydra, and in a search with ASHA."""

import math

import hydra
import torch
from omegaconf import DictConfig, OmegaConf
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hpc_det.core


def digits(*, training: bool) -> TensorDataset:
    """Return pairs (64 pixels in 0..1, digit). Every fifth image is for validation."""
    data = load_digits()
    chosen = (torch.arange(len(data.target)) % 5 != 0) == training
    return TensorDataset(torch.tensor(data.data, dtype=torch.float32)[chosen] / 16, torch.tensor(data.target)[chosen])


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset, device: torch.device) -> float:
    model.eval()
    images, labels = (tensor.to(device) for tensor in data.tensors)
    correct = model(images).argmax(dim=1) == labels
    model.train()
    return correct.float().mean().item()


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> float:
    outside = {  # of an experiment, whose file has these keys
        "searcher": {"metric": "accuracy", "smaller_is_better": False, "max_length": {"epochs": cfg.epochs}},
        "min_checkpoint_period": {"epochs": 1},
    }
    value = math.nan
    with hpc_det.core.init(hparams=OmegaConf.to_container(cfg), config=outside) as core:
        cfg = OmegaConf.merge(cfg, core.hparams)  # in an experiment: the hyperparameters of the trial
        ranks, device = core.distributed, core.distributed.device
        model = nn.Sequential(nn.Linear(64, cfg.width), nn.ReLU(), nn.Dropout(cfg.dropout), nn.Linear(cfg.width, 10))
        model = model.to(device)
        if ranks.size > 1:
            model = nn.parallel.DistributedDataParallel(model)
        optimizer = hydra.utils.instantiate(cfg.optimizer, model.parameters())
        core.track(model=model, optimizer=optimizer)
        data = digits(training=True)
        order = DistributedSampler(data, ranks.size, ranks.rank, seed=core.info.trial_seed)
        loader = DataLoader(data, cfg.batch_size // ranks.size, sampler=order)
        for operation in core.search:
            for images, labels in core.batches(loader, until=operation):
                loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                core.report(core.step, {"loss": loss})
            value = accuracy(model, digits(training=False), device)
            core.report(core.step, {"accuracy": value}, group="validation")
    return value


if __name__ == "__main__":
    main()
