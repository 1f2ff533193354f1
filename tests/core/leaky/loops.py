"""A loop on the Core API that resumes exactly, and loops that differ from it in one aspect.

`verify-resume` takes this folder for the user's code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hpc_det.core import Core


class Points(Dataset[Any]):
    """24 points; the loops use batches of 4."""

    def __init__(self, noise: torch.Generator | None = None) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        point = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return point + torch.randn(4, generator=self.noise), point.sum()[None]


class Sound:
    """A loop in epochs; other classes override a part of it."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        core.track(model=self.model, optimizer=self.optimizer)
        self.loader = self.new_loader()

    def new_loader(self) -> Any:
        return DataLoader(Points(), batch_size=4, shuffle=True)

    def train(self, batch: Any) -> float:
        points, targets = batch
        loss = (self.model(points) - targets).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def validate(self) -> dict[str, float]:
        with torch.no_grad():
            return {"error": float(self.model(torch.ones(4)).abs())}

    def run(self) -> None:
        core = self.core
        for _ in core.epochs(100):
            for batch in core.batches(self.loader):
                core.report(core.step, {"loss": self.train(batch)})
            core.report(core.step, self.validate(), group="validation")


class UntrackedScheduler(Sound):
    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.schedule = self.new_schedule()

    def new_schedule(self) -> Any:
        return torch.optim.lr_scheduler.LinearLR(self.optimizer, total_iters=30)

    def run(self) -> None:
        for batch in self.core.batches(self.loader, until=100):
            self.core.report(self.core.step, {"loss": self.train(batch)})
            self.schedule.step()


class TrackedScheduler(UntrackedScheduler):
    def __init__(self, core: Core) -> None:
        self.core = core
        self.model = nn.Sequential(nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.schedule = self.new_schedule()
        core.track(model=self.model, optimizer=self.optimizer, schedule=self.schedule)
        self.loader = self.new_loader()


class SchedulerAfterItsOptimizer(UntrackedScheduler):
    """To create a scheduler changes the learning rate that was restored; `track` restores it again."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        core.track(schedule=self.schedule)


class DataWithAGenerator(Sound):
    def new_loader(self) -> Any:
        return DataLoader(Points(torch.Generator().manual_seed(1)), batch_size=4, shuffle=True)


class DrawsForEachEpoch(Sound):
    """A resume in the middle of an epoch draws anew."""

    def run(self) -> None:
        core = self.core
        for _ in core.epochs(100):
            shift = torch.randn(1)
            for points, targets in core.batches(self.loader):
                core.report(core.step, {"loss": self.train((points + shift, targets))})


class TotalOfAnEpoch(Sound):
    def run(self) -> None:
        core = self.core
        for _ in core.epochs(100):
            total = 0.0
            for batch in core.batches(self.loader):
                total += self.train(batch)
            core.report(core.step, {"total": total})


class SeedsEachEpoch(Sound):
    """It draws the same in each epoch, which a resume does not change."""

    def run(self) -> None:
        core = self.core
        for epoch in core.epochs(100):
            torch.manual_seed(epoch)
            for batch in core.batches(self.loader):
                core.report(core.step, {"loss": self.train(batch)})


class OwnLoop(Sound):
    """A loop without `batches` and without a loader. It saves what it does not track in files of its own."""

    def run(self) -> None:
        core = self.core
        self.average = self.restored()
        core.restore_generators()
        for step in range(core.step + 1, 101):
            points = torch.randn(4, 4)
            self.average = 0.9 * self.average + 0.1 * self.train((points, points.sum(1, keepdim=True)))
            core.report(step, {"average": self.average})
            if self.has_to_stop(step):
                return

    def restored(self) -> float:
        folder = self.core.latest_checkpoint
        return float(torch.load(folder / "average.pt")["average"]) if folder else 0.0

    def has_to_stop(self, step: int) -> bool:
        stop = bool(self.core.should_stop())
        if stop:
            with self.core.checkpoint(step) as folder:
                torch.save({"average": torch.tensor(self.average, dtype=torch.float64)}, folder / "average.pt")
        return stop


class OwnLoopOnRanks(OwnLoop):
    """Rank 0 alone writes the file, and reports."""

    def run(self) -> None:
        core = self.core
        core.restore_generators()
        for step in range(core.step + 1, 101):
            points = torch.randn(4, 4)
            loss = self.train((points, points.sum(1, keepdim=True)))
            if core.distributed.is_chief:
                core.report(step, {"loss": loss})
            if core.should_stop():
                return


class InASearch(Sound):
    def run(self) -> None:
        core = self.core
        for operation in core.search:
            for batch in core.batches(self.loader, until=operation):
                core.report(core.step, {"loss": self.train(batch)})
            core.report(core.step, self.validate(), group="validation")


class OwnLoopWithALeak(OwnLoop):
    def restored(self) -> float:
        return 0.0


class OwnLoopWithOtherFiles(OwnLoop):
    """What it commits depends on the number of the attempt."""

    def has_to_stop(self, step: int) -> bool:
        stop = bool(self.core.should_stop())
        if stop:
            with self.core.checkpoint(step) as folder:
                content = {"average": torch.tensor(self.average, dtype=torch.float64), "n": self.core.info.attempt}
                torch.save(content, folder / "average.pt")
        return stop


class WithoutACheckpoint(Sound):
    """It tracks nothing, and saves nothing at a stop."""

    def __init__(self, core: Core) -> None:
        self.core = core
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def run(self) -> None:
        for step in range(1, 101):
            points = torch.randn(4, 4)
            self.core.report(step, {"loss": self.train((points, points.sum(1, keepdim=True)))})
            if self.core.should_stop():
                return


class WithoutAStop(Sound):
    """It never asks whether to stop."""

    def run(self) -> None:
        for step in range(1, 5):
            points = torch.randn(4, 4)
            self.core.report(step, {"loss": self.train((points, points.sum(1, keepdim=True)))})
