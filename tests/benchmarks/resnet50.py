"""RaySGD's table: images per second of ResNet-50 on synthetic images, by GPUs, TorchTrainer beside plain torchrun.

`python -m tests.benchmarks.resnet50` uses 1, 2, 4, ... GPUs of this machine; `--cpu` runs a tiny network on two CPUs,
as a test of the benchmark. The snapshot after a call of train() is a part of TorchTrainer's time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpc_det.sgd import TorchTrainer, TrainingOperator
from tests.benchmarks.resnet import ResNet
from tests.benchmarks.table import show

RATE, MOMENTUM = 0.1, 0.9
WARM_UP = 10
Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Size:
    blocks: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    side: int = 224
    batch: int = 128
    """Images per rank."""
    steps: int = 50
    use_gpu: bool = True

    def new_model(self) -> nn.Module:
        torch.manual_seed(0)
        return ResNet(self.blocks, self.width)

    def new_batch(self, device: torch.device) -> Batch:
        images = torch.randn(self.batch, 3, self.side, self.side, device=device)
        return images, torch.randint(1000, (self.batch,), device=device)


TINY = Size(blocks=(1, 1, 1, 1), width=8, side=32, batch=8, steps=40, use_gpu=False)


def main() -> None:
    arguments = _parsed()
    size = Size(batch=arguments.batch, steps=arguments.steps) if not arguments.cpu else TINY
    most = torch.cuda.device_count() if size.use_gpu else 2
    if not most:
        print("resnet50: torch sees no GPU; --cpu shows on two CPUs that it works")
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun sets it
    show(
        f"ResNet {size.blocks} of width {size.width}, {size.batch} images of side {size.side} a GPU, {size.steps} "
        f"steps: images per second",
        ("GPUs" if size.use_gpu else "CPUs", "TorchTrainer", "torchrun", "TorchTrainer use_fp16", "torchrun fp16"),
        [[str(ranks), *_row(size, ranks)] for ranks in _counts(most)],
    )


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true", help="a tiny network on two CPUs")
    parser.add_argument("--batch", type=int, default=Size.batch, help="images of each GPU")
    parser.add_argument("--steps", type=int, default=Size.steps, help="that are measured")
    return parser.parse_args()


def _counts(most: int) -> list[int]:
    """Return 1, 2, 4, ... and `most`."""
    return sorted({2**k for k in range(most.bit_length())} | {most})


def _row(size: Size, ranks: int) -> list[str]:
    return [
        f"{measure(size, ranks, use_fp16):.1f}" for use_fp16 in (False, True) for measure in (_by_trainer, _by_torchrun)
    ]


# --- TorchTrainer


class Images(TrainingOperator):
    def setup(self, config: dict[str, Any]) -> None:
        size: Size = config["size"]
        model = size.new_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=nn.CrossEntropyLoss()
        )
        self.register_data(train_loader=Endless(size.new_batch(self.device)))


class Endless:
    """Repeats the same batch, so that no loader is measured."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def __iter__(self) -> Iterator[Batch]:
        return repeat(self._batch)


def _by_trainer(size: Size, ranks: int, use_fp16: bool) -> float:
    with TorchTrainer(
        training_operator_cls=Images,
        num_workers=ranks,
        executor="local",
        use_gpu=size.use_gpu,
        use_fp16=use_fp16,
        config={"size": size},
    ) as trainer:
        trainer.train(num_steps=WARM_UP)
        began = time.perf_counter()
        trainer.train(num_steps=size.steps)
        return ranks * size.batch * size.steps / (time.perf_counter() - began)


# --- torchrun


def _by_torchrun(size: Size, ranks: int, use_fp16: bool) -> float:
    with tempfile.TemporaryDirectory() as folder:
        order = json.dumps({**asdict(size), "use_fp16": use_fp16, "file": str(Path(folder, "seconds"))})
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        subprocess.run([*torchrun, "-m", "tests.benchmarks.resnet50_rank", order], check=True)
        return ranks * size.batch * size.steps / float(Path(folder, "seconds").read_text())


def train_under_torchrun(order: str) -> None:
    """Train as a rank; rank 0 writes the seconds of the steps."""
    options = json.loads(order)
    use_fp16, file = options.pop("use_fp16"), options.pop("file")
    size = Size(**options)
    dist.init_process_group("nccl" if size.use_gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if size.use_gpu else torch.device("cpu")
    if size.use_gpu:
        torch.cuda.set_device(device)
    step = Steps(size, device, use_fp16)
    step.train(WARM_UP)
    began = time.perf_counter()
    step.train(size.steps)
    if dist.get_rank() == 0:
        Path(file).write_text(str(time.perf_counter() - began))
    dist.destroy_process_group()


class Steps:
    """A training loop as in torch's documentation."""

    def __init__(self, size: Size, device: torch.device, use_fp16: bool) -> None:
        model = size.new_model().to(device)
        self._model = DistributedDataParallel(model, [device] if size.use_gpu else None)
        self._optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
        self._criterion = nn.CrossEntropyLoss()
        self._batch = size.new_batch(device)
        self._device = device
        self._use_fp16 = use_fp16
        self._scaler = torch.amp.GradScaler(device.type, enabled=use_fp16 and size.use_gpu)

    def train(self, steps: int) -> None:
        images, labels = self._batch
        for _ in range(steps):
            with self._autocast():
                loss = self._criterion(self._model(images), labels)
            self._optimizer.zero_grad()
            self._scaler.scale(loss).backward()
            self._scaler.step(self._optimizer)
            self._scaler.update()
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _autocast(self) -> AbstractContextManager[Any]:
        if not self._use_fp16:
            return nullcontext()
        kind = torch.float16 if self._device.type == "cuda" else torch.bfloat16
        return torch.autocast(self._device.type, dtype=kind)


if __name__ == "__main__":
    main()
