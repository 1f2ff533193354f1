"""Trials with engines that log each micro batch: ZeRO of every stage, and a pipeline of two stages."""

import os
import signal
import socket
import time
from pathlib import Path

import deepspeed
import numpy as np
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn
from torch.utils.data import TensorDataset

from hpc_det.pytorch import DataLoader
from hpc_det.pytorch.deepspeed import DeepSpeedTrial, DeepSpeedTrialContext
from hpc_det.store.attempt import read_stop

RECORDS, MICRO = 240, 3


class LoggedLoss(nn.Module):
    """Returns the loss of a micro batch, and logs the numbers of its training records.

    In the batch that hyperparameters.waits_at contains for this attempt, the last rank waits after the first micro
    batch, until it is asked to stop or a test kills or stops it.
    """

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__()
        self.context = context
        self.attempt = int(os.environ.get("HPC_DET_NUMBER", 0))
        self.is_last_rank = context.distributed.get_rank() == context.distributed.get_size() - 1

    def forward(self, outputs: torch.Tensor, numbered: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            number = self.context.current_train_batch()
            say(f"micro batch of {number}: {numbered[:, 0].int().tolist()}")
            if self.is_last_rank:
                self._have_trouble(number)
        return nn.functional.cross_entropy(outputs, numbered[:, 1].long())

    def _have_trouble(self, number: int) -> None:
        if self.context.get_hparam("raise_at") == number and self.attempt == 1:
            raise RuntimeError("the sky has fallen")
        (waits_at,) = self.context.get_hparam("waits_at")[self.attempt - 1 : self.attempt] or [-1]
        if 0 <= waits_at <= number:
            self._wait(number)

    def _wait(self, number: int) -> None:
        """Wait for the stop request, and a little longer: ranks still have to agree on the stop."""
        stop = Path(os.environ["HPC_DET_FOLDER"], "stop.json")
        if not read_stop(stop, self.attempt):
            say(f"waiting in {number}")
        while not read_stop(stop, self.attempt):
            time.sleep(0.05)
        time.sleep(0.2)


def say(line: str) -> None:
    """Print a line with one write, since ranks may share a log."""
    print(f"{line}\n", end="", flush=True)


class WithData(DeepSpeedTrial):
    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        self.loss = LoggedLoss(context)
        records = torch.randn(RECORDS, 16, generator=torch.Generator().manual_seed(1))
        numbered = torch.stack([torch.arange(RECORDS).float(), records[:, :4].argmax(dim=1).float()], dim=1)
        self.data = TensorDataset(records, numbered)

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(self.data, batch_size=MICRO, shuffle=True)

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(self.data, batch_size=MICRO)

    def config(self, stage: int) -> dict:
        return {
            "train_micro_batch_size_per_gpu": MICRO,
            "gradient_accumulation_steps": self.context.get_hparam("accumulation"),
            "gradient_clipping": 0.5,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 30, "warmup_max_lr": 0.02}},
        }

    def save(self, context, path):
        if context.get_hparam("dies_in_save") and self.loss.attempt == 1 and self.loss.is_last_rank:
            context.shards.save = die_in_a_file
        super().save(context, path)


def die_in_a_file(state, path):
    Path(path).write_bytes(b"half a file")
    os.kill(os.getpid(), signal.SIGKILL)


class Zero(WithData):
    """A trial with one engine. Hyperparameter `stage`: 0 to 3.

    Every size is divisible by four ranks: the padding of ZeRO-3's shards is uninitialised memory, which differs in each
    run.
    """

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 4))
        parameters = list(model.parameters())
        config = self.config(context.get_hparam("stage"))
        engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config)
        self.engine = context.wrap_model_engine(engine)

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        records, numbered = self.context.to_device(next(dataloader_iter))
        noise = torch.from_numpy(np.random.normal(scale=0.1, size=records.shape)).float()
        loss = self.loss(self.engine(records + noise), numbered)
        self.engine.backward(loss)
        self.engine.step()
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter, batch_idx):
        records, numbered = self.context.to_device(next(dataloader_iter))
        outputs = self.engine(records)
        accuracy = (outputs.argmax(dim=1) == numbered[:, 1]).float().mean()
        return {"loss": self.loss(outputs, numbered), "accuracy": accuracy}


class Piped(WithData):
    """A trial with a pipeline of two stages, each on half of the ranks."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        layers = [LayerSpec(nn.Linear, 16, 32), nn.Tanh(), nn.Dropout(0.2), LayerSpec(nn.Linear, 32, 20), nn.Tanh()]
        layers = [*layers, nn.Dropout(0.2), LayerSpec(nn.Linear, 20, 4)]
        module = PipelineModule(layers, num_stages=2, loss_fn=self.loss, partition_method="uniform")
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.engine, *_ = deepspeed.initialize(model=module, model_parameters=parameters, config=self.config(stage=1))
        context.wrap_model_engine(self.engine)
        say(f"stage {self.engine.stage_id} on {socket.gethostname()}")

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        return {"loss": self.engine.train_batch(dataloader_iter)}

    def evaluate_batch(self, dataloader_iter, batch_idx):
        return {"loss": self.engine.eval_batch(dataloader_iter)}
