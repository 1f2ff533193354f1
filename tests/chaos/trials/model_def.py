"""Trials, one of them sharded, with all the state that a resume can get wrong, as their hyperparameters say."""

import random

import numpy as np
import torch
from disturb import Disturber, Hooks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import lr_scheduler
from torch.utils.data import BatchSampler, Dataset, Sampler, SequentialSampler

from hpc_det.pytorch import DataLoader, LRScheduler, PyTorchTrial, samplers

OPTIMIZERS = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.03, momentum=0.9, nesterov=True),
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=0.01, amsgrad=True),
    "adagrad": lambda weights: torch.optim.Adagrad(weights, lr=0.02),
    "rmsprop": lambda weights: torch.optim.RMSprop(weights, lr=0.005, momentum=0.5, centered=True),
    "nadam": lambda weights: torch.optim.NAdam(weights, lr=0.01),
    "radam": lambda weights: torch.optim.RAdam(weights, lr=0.01),
    "adamax": lambda weights: torch.optim.Adamax(weights, lr=0.01),
    "asgd": lambda weights: torch.optim.ASGD(weights, lr=0.02, t0=3),
    "rprop": lambda weights: torch.optim.Rprop(weights, lr=0.002),
}
SCHEDULES = {
    "step": lambda its: lr_scheduler.StepLR(its, 2, gamma=0.8),
    "warm restarts": lambda its: lr_scheduler.CosineAnnealingWarmRestarts(its, T_0=3, T_mult=2),
    "warmup": lambda its: lr_scheduler.SequentialLR(
        its, [lr_scheduler.LinearLR(its, 0.1, total_iters=4), lr_scheduler.ExponentialLR(its, 0.95)], [4]
    ),
    "one cycle": lambda its: lr_scheduler.OneCycleLR(its, max_lr=0.05, total_steps=200, cycle_momentum=False),
    "cyclic": lambda its: lr_scheduler.CyclicLR(its, 0.01, 0.04, step_size_up=3, cycle_momentum=False),
    "lambda": lambda its: lr_scheduler.LambdaLR(its, lambda step: 1 / (1 + 0.1 * step)),
}
WIDTH = 6


class Records(Dataset):
    """Records with noise from every common generator, or without noise."""

    def __init__(self, count, noisy):
        self.inputs = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(count))
        self.noisy = noisy

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, number):
        inputs = self.inputs[number]
        noise = 0.1 * (random.random() + np.random.random() + torch.rand(())) if self.noisy else 0.0
        return (inputs + noise).float(), inputs.sum(dim=0, keepdim=True)


class Shuffled(Sampler):
    """Shuffles with torch's own generator."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __iter__(self):
        return iter(torch.randperm(self.count).tolist())


class Net(nn.Module):
    """A net with an exponential average of its weights, and one of its inputs, which differs on each rank."""

    def __init__(self, hparams):
        super().__init__()
        norms = {"batch": nn.BatchNorm1d(8), "layer": nn.LayerNorm(8), "none": nn.Identity()}
        self.first, self.norm = nn.Linear(WIDTH, 8), norms[hparams["norm"]]
        self.dropout, self.last = nn.Dropout(hparams["dropout"]), nn.Linear(8, 1)

    def add_averages(self):
        self.register_buffer("average", torch.zeros_like(self.own_weight))
        self.register_buffer("seen", torch.zeros(WIDTH))

    @property
    def own_weight(self):
        weight = self.first.weight.detach()
        return weight.to_local() if isinstance(weight, DTensor) else weight

    def forward(self, inputs):
        if self.training:
            self.seen.lerp_(inputs.detach().float().mean(dim=0), 0.1)
        return self.last(self.dropout(torch.relu(self.norm(self.first(inputs)))))

    def follow(self):
        self.average.lerp_(self.own_weight, 0.05)


class WithoutEvaluation(PyTorchTrial):
    def __init__(self, context):
        self.context = context
        self.disturb = Disturber(context)
        hparams = self.hparams = context.get_hparams()
        if hparams["amp"] != "none":
            context.experimental.use_amp(getattr(torch, hparams["amp"]))
        if hparams["data"] == "own":
            context.experimental.disable_dataset_reproducibility_checks()
        model = Net(hparams)
        self.shard(model)
        model.add_averages()
        self.model = context.wrap_model(model, **self.ddp_options())
        self.optimizers = [
            context.wrap_optimizer(OPTIMIZERS[name](weights))
            for name, weights in zip(hparams["optimizers"], self.parts(model), strict=True)
        ]
        mode = LRScheduler.StepMode[hparams["lr_mode"]]
        schedule = SCHEDULES[hparams["lr_schedule"]](self.optimizers[0])
        context.wrap_lr_scheduler(schedule, mode, frequency=hparams["lr_frequency"])
        self.plateau = context.wrap_lr_scheduler(
            lr_scheduler.ReduceLROnPlateau(self.optimizers[-1], patience=0), LRScheduler.StepMode.MANUAL_STEP
        )
        self.records = context.wrap_reducer(sum, "records")

    def parts(self, model):
        """Return the parameters of each optimizer."""
        if len(self.hparams["optimizers"]) == 1:
            return [list(model.parameters())]
        first = list(model.first.parameters())
        return [first, [each for each in model.parameters() if all(each is not other for other in first)]]

    def shard(self, model):
        """Do nothing: only ShardedTrial shards its model."""

    def ddp_options(self):
        return {"broadcast_buffers": self.hparams["broadcast_buffers"]}

    def build_callbacks(self):
        return {"hooks": TrialHooks(self)}

    def build_training_data_loader(self):
        data = Records(self.hparams["records"], self.hparams["data"] != "own")
        batch = self.context.get_per_slot_batch_size()
        options = {"num_workers": self.hparams["workers"], "persistent_workers": self.hparams["persistent"]}
        if self.hparams["data"] == "own":
            return torch.utils.data.DataLoader(data, batch_sampler=self.own_batches(data, batch))
        if self.hparams["data"] == "sampler":
            return DataLoader(data, batch_size=batch, sampler=Shuffled(len(data)), **options)
        if self.hparams["data"] == "batch_sampler":
            return DataLoader(data, batch_sampler=BatchSampler(Shuffled(len(data)), batch, False), **options)
        return DataLoader(data, batch_size=batch, shuffle=self.hparams["data"] == "shuffled", **options)

    def own_batches(self, data, batch):
        gang, seed = self.context.distributed, self.context.get_trial_seed()
        order = samplers.RepeatSampler(samplers.ReproducibleShuffleSampler(SequentialSampler(data), seed=seed))
        order = samplers.DistributedSampler(order, num_workers=gang.get_size(), rank=gang.get_rank())
        return samplers.SkipBatchSampler(BatchSampler(order, batch, True), self.context.get_initial_batch())

    def build_validation_data_loader(self):
        return DataLoader(Records(18, noisy=True), batch_size=4, num_workers=self.hparams["workers"])

    def train_batch(self, batch, epoch_idx, batch_idx):
        self.disturb.batch = batch_idx
        inputs, targets = batch
        noise = 0.1 * (random.random() + np.random.random())
        loss = (self.model(inputs) - targets + noise).square().mean()
        self.records.update(len(inputs))
        self.context.backward(loss)
        for optimizer in self.optimizers:
            self.context.step_optimizer(optimizer, clip_grads=clipped if self.hparams["clips"] else None)
        self.model.follow()
        self.disturb("batch")
        return {"loss": loss, "noise": noise, "rate": self.optimizers[0].param_groups[0]["lr"]}


def clipped(weights):
    nn.utils.clip_grad_norm_(weights, max_norm=0.5)


class TrialHooks(Hooks):
    """Lowers a learning rate when validations do not improve, and freezes a layer for a while."""

    def __init__(self, trial):
        super().__init__(trial.context, trial.disturb)
        self.trial = trial

    def on_validation_end(self, metrics):
        self.trial.plateau.step(metrics["loss"])
        super().on_validation_end(metrics)

    def on_training_epoch_start(self, epoch_idx):
        if self.trial.hparams["freezes"]:
            self.trial.model.last.requires_grad_(epoch_idx % 2 == 0)


class PlainTrial(WithoutEvaluation):
    def evaluate_batch(self, batch):
        inputs, targets = batch
        self.disturb("validation")
        self.records.update(len(inputs))
        return {"loss": (self.model(inputs) - targets).abs().mean(), "noise": torch.rand(())}


class FullTrial(WithoutEvaluation):
    """Rank 0 validates all records at once, or a stop interrupts it."""

    def evaluate_full_dataset(self, data_loader):
        errors = []
        for inputs, targets in data_loader:
            self.disturb("validation")
            errors.append((self.model(inputs) - targets).abs().mean())
        return {"loss": torch.stack(errors).mean(), "noise": torch.rand(())}


class ShardedTrial(PlainTrial):
    def shard(self, model):
        options = {"reshard_after_forward": self.hparams["reshard"]}
        if self.hparams["mixed"]:
            options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        fully_shard(model.first, **options)
        fully_shard(model, **options)

    def ddp_options(self):
        return {}
