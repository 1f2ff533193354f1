"""One workload, a linear model on ready-made batches, in every loop that is compared.

Each function trains `turns.batches` batches and returns the weights, which are the same in all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset, default_collate

from hpc_det.config.merge import merge
from hpc_det.distributed.collectives import Distributed
from hpc_det.distributed.preempt import StopAgreement
from hpc_det.pytorch import DataLoader, PyTorchCallback, PyTorchTrial, PyTorchTrialContext
from hpc_det.pytorch.trial.trial import Trial
from hpc_det.store.folders import TrialFolder
from tests.benchmarks.turns import (
    RATE,
    RECORDS,
    BareLoop,
    Batch,
    Turns,
    device,
    new_model,
    ready_made_batches,
    weights_of,
)
from tests.pytorch.trials import CONFIG, Life

Loop = Callable[..., torch.Tensor]
"""Called as loop(turns, folder, [distributed])."""

# --- ours


class Watching(PyTorchCallback):
    def on_training_epoch_start(self, epoch_idx: int) -> None:
        pass

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        pass


class Linear(PyTorchTrial):
    new_model = staticmethod(new_model)

    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        context.experimental.disable_dataset_reproducibility_checks()
        self.model = context.wrap_model(self.new_model())
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=RATE))

    def build_validation_data_loader(self) -> list[Batch]:
        return ready_made_batches(1)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        inputs, targets = batch
        loss = cross_entropy(self.model(inputs), targets)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        return {"loss": cross_entropy(self.model(inputs), targets)}

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {"watching": Watching()}


def train_trial(
    folder: Path,
    loader: DataLoader | Iterable[Batch],
    batches: int,
    distributed: Distributed | None = None,
    *,
    tensorboard: bool = True,
    trial_class: type[PyTorchTrial] = Linear,
) -> torch.Tensor:
    """Train a whole trial for this number of batches of `loader`, with a report every 100; return its checkpoint's
    weights.
    """
    life = new_life(folder, with_data(trial_class, loader), batches)
    life.tensorboard = tensorboard
    train_life(life, distributed or Distributed())
    weights: dict[str, torch.Tensor] = life.newest["state_dict.pth"]["models_state_dict"][0]
    return next(iter(weights.values()))


def train_life(life: Life, distributed: Distributed) -> None:
    with stops(distributed, life.folder.path.name) as stop:
        life.attempt(stop, distributed)


@contextmanager
def stops(distributed: Distributed, name: str) -> Iterator[StopAgreement]:
    """Yield a real agreement, with its thread, which the loop checks at every batch."""
    stop = StopAgreement(distributed.messages, name)
    yield stop
    distributed.barrier()
    stop.close()


def with_data(trial_class: type[PyTorchTrial], loader: DataLoader | Iterable[Batch]) -> type[PyTorchTrial]:
    class WithData(trial_class):  # type: ignore[misc, valid-type]
        def build_training_data_loader(self) -> DataLoader | Iterable[Batch]:
            return loader

    return WithData


def new_life(
    path: Path, trial_class: type[Trial], batches: int, hparams: Mapping[str, int] = {"global_batch_size": RECORDS}
) -> Life:
    folder = TrialFolder(path)
    folder.checkpoints.mkdir(parents=True, exist_ok=True)  # all ranks of a gang do this
    config = {
        "searcher": {"max_length": {"batches": batches}},
        "scheduling_unit": 100,
        "min_validation_period": {"batches": 0},
        "min_checkpoint_period": {"batches": 0},
        "checkpoint_policy": "none",
    }
    return Life(folder, trial_class, merge(CONFIG, config), hparams)


def ours(turns: Turns, folder: Path, distributed: Distributed | None = None) -> torch.Tensor:
    return train_trial(folder, turns.of(ready_made_batches()), turns.batches, distributed)


def ours_without_tensorboard(turns: Turns, folder: Path) -> torch.Tensor:
    return train_trial(folder, turns.of(ready_made_batches()), turns.batches, tensorboard=False)


def ours_with_our_loader(turns: Turns, folder: Path) -> torch.Tensor:
    def collate(records: list[Any]) -> Any:
        turns.begin_batch()
        return default_collate(records)

    return train_trial(folder, DataLoader(dataset(), RECORDS, collate_fn=collate), turns.batches)


def dataset() -> TensorDataset:
    """Return the records on the CPU."""
    return TensorDataset(*(torch.cat(parts).cpu() for parts in zip(*ready_made_batches(), strict=True)))


def batches_of_torchs_loader() -> Iterator[Batch]:
    """Yield batches on the device."""
    on_gpu = device().type == "cuda"
    loader = torch.utils.data.DataLoader(dataset(), RECORDS, pin_memory=on_gpu)
    while True:
        yield from map(_copied, loader) if on_gpu else loader


def _copied(batch: Batch) -> Batch:
    inputs, targets = batch
    return inputs.to(device(), non_blocking=True), targets.to(device(), non_blocking=True)


# --- the bare loop


def bare(turns: Turns, folder: Path, distributed: Distributed | None = None) -> torch.Tensor:
    """Train the bare loop, measured as the others are, which shows the cost of measuring."""
    loop = BareLoop(iter(turns.of(ready_made_batches())), DistributedDataParallel if distributed else None)
    loop.train(turns.batches)
    return loop.weights


def minimal(turns: Turns, folder: Path) -> torch.Tensor:
    """Train as the bare loop does; only count the batches and add up the losses."""
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    count, total = 0, 0.0
    for inputs, targets in turns.of(ready_made_batches()):
        loss = cross_entropy(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        count += 1
        total += loss.item()
    assert count == turns.batches
    assert total > 0
    return weights_of(model)


# --- others: with one rank, and as a rank of a gang whose process group is there


def fabric(turns: Turns, folder: Path, distributed: Distributed | None = None) -> torch.Tensor:
    from lightning.fabric import Fabric

    fabric = Fabric(**_place(distributed))
    fabric.launch()
    own = new_model()
    model, optimizer = fabric.setup(own, torch.optim.SGD(own.parameters(), lr=RATE))
    for inputs, targets in turns.of(ready_made_batches()):
        loss = cross_entropy(model(inputs), targets)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(own)


def accelerate(turns: Turns, folder: Path, distributed: Distributed | None = None) -> torch.Tensor:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=device().type == "cpu")
    own = new_model()
    model, optimizer = accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=RATE))
    for inputs, targets in turns.of(ready_made_batches()):
        loss = cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(own)


def accelerate_accumulating(turns: Turns, folder: Path, distributed: Distributed | None = None) -> torch.Tensor:
    """Train with Accelerate's `accumulate`, which a loop needs for the effect of our aggregation_frequency."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=device().type == "cpu")
    own = new_model()
    model, optimizer = accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=RATE))
    for inputs, targets in turns.of(ready_made_batches()):
        with accelerator.accumulate(model):
            loss = cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return weights_of(own)


def lightning_barebones(turns: Turns, folder: Path, distributed: Distributed | None = None) -> torch.Tensor:
    return _lightning(turns, folder, distributed, logs=False, barebones=True)


def lightning(turns: Turns, folder: Path, distributed: Distributed | None = None) -> torch.Tensor:
    """Train with Lightning's defaults: progress bar, logger, checkpoint at the end."""
    return _lightning(turns, folder, distributed, logs=False)


def lightning_logging(turns: Turns, folder: Path, distributed: Distributed | None = None) -> torch.Tensor:
    """Train with Lightning's defaults and a metric, as ours."""
    return _lightning(turns, folder, distributed, logs=True)


def _lightning(
    turns: Turns, folder: Path, distributed: Distributed | None, *, logs: bool, **options: bool
) -> torch.Tensor:
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = new_model()

        def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
            inputs, targets = batch
            loss = cross_entropy(self.model(inputs), targets)
            if logs:
                self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=RATE)

    module = Module()
    trainer = Trainer(**_place(distributed), max_epochs=1, default_root_dir=folder, **options)
    trainer.fit(module, turns.of(ready_made_batches()))
    return weights_of(module.model)


def _place(distributed: Distributed | None) -> dict[str, Any]:
    """Return options for Lightning and Fabric; those for a gang are as under torchrun, so that they start no ranks
    themselves.
    """
    if distributed is None:
        return {"accelerator": "gpu" if device().type == "cuda" else "cpu", "devices": 1}
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    environment = TorchElasticEnvironment()
    return {"accelerator": "cpu", "devices": distributed.size, "strategy": "ddp", "plugins": [environment]}


_OTHERS: dict[str, tuple[str, Loop]] = {
    "Fabric": ("lightning", fabric),
    "Accelerate": ("accelerate", accelerate),
    "Accelerate with `accumulate`": ("accelerate", accelerate_accumulating),
    "Lightning, barebones": ("lightning", lightning_barebones),
    "Lightning": ("lightning", lightning),
    "Lightning with `self.log`": ("lightning", lightning_logging),
}


def others() -> dict[str, Loop]:
    """Return the loops whose packages are installed (the extra `bench`)."""
    return {name: loop for name, (package, loop) in _OTHERS.items() if find_spec(package)}
