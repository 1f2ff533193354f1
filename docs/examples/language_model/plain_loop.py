"""The training of model_def.py, as a plain loop on hpc_det.core: the same network, data and hyperparameters."""

import math

import torch
from sonnets import TEXT, TRAINING, LanguageModel, Stretches, warmed_up
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import hpc_det.core

VALIDATION_PERIOD = 100  # batches


class Training:
    def __init__(self, core: hpc_det.core.Core) -> None:
        self.core = core
        hparams = core.hparams
        self.device = core.distributed.device
        model = LanguageModel(hparams["width"], hparams["dropout"]).to(self.device)
        self.model = nn.parallel.DistributedDataParallel(model) if core.distributed.size > 1 else model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=hparams["learning_rate"])
        self.scheduler = warmed_up(self.optimizer, hparams["warmup_batches"])
        core.track(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler)
        length = hparams["sequence_length"]
        self.loader = self.shared(Stretches(TEXT[:TRAINING], length, stride=1))
        self.validation = DataLoader(Stretches(TEXT[TRAINING:], length, stride=length), batch_size=64)

    def shared(self, data: Dataset) -> DataLoader:
        """Return a loader of this rank's share of the data, in another order in each epoch."""
        ranks = self.core.distributed
        sampler = DistributedSampler(data, num_replicas=ranks.size, rank=ranks.rank, seed=self.core.info.trial_seed)
        return DataLoader(data, batch_size=self.core.hparams["global_batch_size"] // ranks.size, sampler=sampler)

    def run(self) -> None:
        for operation in self.core.search:
            for characters, following in self.core.batches(self.loader, until=operation):
                self.core.report(self.core.step, {"loss": self.train(characters, following)})
                if self.core.step % VALIDATION_PERIOD == 0 and not operation.is_reached:
                    self.core.report(self.core.step, self.validate(), group="validation")
            self.core.report(self.core.step, self.validate(), group="validation")

    def train(self, characters: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        scores = self.model(characters.to(self.device))
        loss = nn.functional.cross_entropy(scores, following.to(self.device))
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        return loss

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Return the metrics over all validation data; every rank computes them, since there are few."""
        self.model.eval()
        losses = [
            nn.functional.cross_entropy(
                self.model(characters.to(self.device)), following.to(self.device), reduction="none"
            )
            for characters, following in self.validation
        ]
        self.model.train()
        loss = torch.cat(losses).mean().item()
        return {"validation_loss": loss, "perplexity": math.exp(loss)}


if __name__ == "__main__":
    with hpc_det.core.init() as core:
        Training(core).run()
