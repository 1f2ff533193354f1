"""A plain training loop on the Core API, and a class that runs its attempts, which are stopped, killed and resumed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from hpc_det.checkpoint.committed import committed, newest_good
from hpc_det.checkpoint.content import load
from hpc_det.checkpoint.retention import Policy
from hpc_det.config.merge import merge
from hpc_det.core.core import Core
from hpc_det.core.run import JobServices, Run
from hpc_det.core.tracked import TRACKED
from hpc_det.distributed.collectives import Distributed
from hpc_det.distributed.metrics import MetricsLog
from hpc_det.distributed.rng import seed_everything
from hpc_det.distributed.searcher import SearcherContext
from hpc_det.node.json_files import read_json
from hpc_det.store.folders import TrialFolder
from hpc_det.store.metrics import read_reports
from tests.pytorch.trials import StopAt

CONFIG: dict[str, Any] = {
    "searcher": {"name": "single", "metric": "error", "smaller_is_better": True, "max_length": {"epochs": 3}},
    "checkpoint_policy": "none",
}
PASS = 6
"""Batches of a pass of `plain_loop`."""


class Records(Dataset[Any]):
    """46 records in batches of 8, the last of which is short; items may draw random numbers."""

    def __init__(self, random_items: bool) -> None:
        self._random_items = random_items

    def __len__(self) -> int:
        return 46

    def __getitem__(self, number: int) -> Any:
        inputs = torch.randn(4, generator=torch.Generator().manual_seed(number))
        if self._random_items:
            inputs = inputs + 0.1 * torch.randn(4) + 0.1 * random.random() + 0.1 * np.random.random()
        return inputs, inputs.sum(dim=0, keepdim=True)


class PlainLoop:
    """A loop with dropout, momentum and draws from every generator, in three passes of six batches."""

    def __init__(self, core: Core) -> None:
        self.core = core
        options = core.hparams
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        self.seen: dict[str, list[float]] = {"sums": []}
        core.track(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler)
        core.track(seen=self.seen, per_rank=True)
        gang, data = core.distributed, Records(options.get("random_items", False))
        shared: Any = DistributedSampler(data, gang.size, gang.rank) if gang.size > 1 else None
        self.loader: Any = DataLoader(
            data,
            batch_size=8 // gang.size,
            shuffle=shared is None,
            sampler=shared,
            num_workers=options.get("workers", 0),
        )

    def train(self, batch: Any) -> float:
        inputs, targets = batch
        noise = 0.1 * (random.random() + np.random.random())
        loss = (self.model(inputs) - targets + noise).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            self.core.distributed.sum(parameter.grad)
        self.optimizer.step()
        self.seen["sums"].append(float(inputs.sum()))
        return float(loss.detach())

    def validate(self) -> dict[str, float]:
        with torch.no_grad():
            return {"error": float(self.model(torch.ones(4)).abs()), "noise": random.random()}

    def run(self) -> None:
        for _ in self.core.epochs(3):
            for batch in self.core.batches(self.loader):
                self.core.report(self.core.step, {"loss": self.train(batch)})
            self.scheduler.step()
            self.core.report(self.core.step, self.validate(), group="validation")


@dataclass
class Loop:
    """One trial, whose attempts run `program`."""

    folder: TrialFolder
    program: Any = PlainLoop
    hparams: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    worker: int | None = None
    """Number of the worker in the experiment's search; None without a search."""
    attempts: int = 0

    @classmethod
    def begin(
        cls, path: Path, program: Any = PlainLoop, hparams: Any = None, worker: int | None = None, **config: Any
    ) -> Loop:
        folder = TrialFolder(path)
        folder.checkpoints.mkdir(parents=True)
        (path / "code").mkdir()
        return cls(folder, program, hparams or {}, merge(CONFIG, config), worker)

    def attempt(self, stop: Any = None, distributed: Distributed | None = None) -> Core:
        """Create all objects as in a new process, and run the program in the block of `init`."""
        distributed = distributed or Distributed()
        self.attempts += 1
        seed_everything(5)
        core = Core(self._run(stop or StopAt(), distributed))
        with core.finishing():
            self.program(core).run()
            core.finish()
        return core

    def _run(self, stop: Any, distributed: Distributed) -> Run:
        spec = {"experiment_id": 1, "trial_id": self.folder_id, "trial_seed": 5, "hparams": dict(self.hparams)}
        job = None
        if self.worker is not None:
            job = JobServices(
                code=self.folder.path / "code",
                searcher=SearcherContext(self.folder, self.worker, distributed),
                retention=Policy,
                mirror=None,
                grace_s=None,
            )
        return Run(
            spec={**spec, "config": dict(self.config)},
            folder=self.folder,
            attempt=self.attempts,
            distributed=distributed,
            stop=stop,
            log=MetricsLog(self.folder, self.attempts),
            job=job,
        )

    @property
    def folder_id(self) -> int:
        return int(self.folder.path.name) if self.folder.path.name.isdigit() else 1

    @property
    def series(self) -> list[tuple[str, int, dict[str, Any]]]:
        return [(each["kind"], each["steps"], each["metrics"]) for each in read_reports(self.folder.metrics)]

    @property
    def checkpoints(self) -> list[int]:
        """Batches of each checkpoint, the oldest first."""
        return sorted(checkpoint.steps for checkpoint in committed(self.folder.checkpoints))

    @property
    def newest(self) -> Path:
        found, _ = newest_good(self.folder.checkpoints)
        assert found
        return found.path

    def tracked(self) -> dict[str, Any]:
        """The tracked objects in the newest checkpoint, and those of each rank."""
        folder = self.newest
        of_ranks = {path.name: load(path) for path in sorted(folder.glob("rank-*.pth"))}
        own = {name: (content["tracked"], content["rng"]["torch"].tolist()) for name, content in of_ranks.items()}
        return {**load(folder / TRACKED), **own}

    @property
    def outcome(self) -> dict[str, Any]:
        found: dict[str, Any] | None = read_json(self.folder.outcome)
        assert found
        return found


def assert_same(mine: Loop, other: Loop) -> None:
    """Check that every report and every saved value is bit-equal."""
    assert mine.series == other.series
    assert _plain(mine.tracked()) == _plain(other.tracked())


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value
