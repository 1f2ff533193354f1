"""Launchers x what can stop a gang: the rows and columns that the matrix tests of each scheduler share."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import pytest

from tests.e2e.story import WAITS_AT, Story, hpc_det
from tests.launch import mpiruns

TWO_SLOTS = "resources.slots_per_trial=2"
BUSY_AT = 10
"""The batch at which trouble comes: past the first checkpoint."""

Lab = TypeVar("Lab", contravariant=True)


@dataclass(frozen=True)
class Launcher:
    module: str
    starts_ranks: Callable[[], str] = lambda: "mpirun"
    """The profile's `mpi_launcher`; skips the test where that cannot be had."""

    @property
    def entrypoint(self) -> str:
        return f"entrypoint=python3 -m hpc_det.launch.{self.module} --trial model_def:StoryTrial"


LAUNCHERS = {
    "direct": Launcher("direct"),
    "torch_distributed": Launcher("torch_distributed"),
    "mpich": Launcher("mpi", lambda: mpiruns.mpirun("mpich")),
    "open_mpi": Launcher("mpi", lambda: mpiruns.mpirun("open_mpi")),
    "deepspeed": Launcher("deepspeed"),
}


@dataclass(frozen=True)
class Trouble(Generic[Lab]):
    """What happens to a story that is at batch `BUSY_AT`, and how its attempts end, in order."""

    comes: Callable[[Lab, Story], None]
    causes: tuple[str, ...]
    overrides: tuple[str, ...] = ()


def _paused_for_a_while(lab: object, story: Story) -> None:
    hpc_det("experiment", "pause", story.number)
    story.until(lambda: story.describe()["state"] == "PAUSED")
    hpc_det("experiment", "activate", story.number)


def _a_rank_killed(lab: object, story: Story) -> None:
    os.kill(story.rank_pid(1), signal.SIGKILL)


def _nothing_from_outside(lab: object, story: Story) -> None:
    pass


ANYWHERE: dict[str, Trouble[object]] = {
    "pause": Trouble(_paused_for_a_while, ("paused", "finished")),
    "crash": Trouble(_a_rank_killed, ("failed", "finished"), ("max_restarts=1",)),
    "hang": Trouble(
        _nothing_from_outside,
        ("hung", "finished"),
        ("hang_timeout_s=10", "max_restarts=0"),
    ),
}
"""What needs no scheduler."""


def cells(launchers: Iterable[str], troubles: Collection[str], in_a_hurry: Collection[tuple[str, str]]) -> list[Any]:
    """All pairs; those not `in_a_hurry` are long."""
    pairs = list(itertools.product(launchers, troubles))
    assert set(in_a_hurry) <= set(pairs)
    return [pytest.param(*pair, marks=[] if pair in in_a_hurry else pytest.mark.long) for pair in pairs]


def told(lab: Lab, launcher: Launcher, trouble: Trouble[Lab], *overrides: str) -> Story:
    """The story on the cluster `lab` with this trouble, at its end."""
    story = Story.begin(
        launcher.entrypoint, TWO_SLOTS, WAITS_AT.format(BUSY_AT), *trouble.overrides, *overrides, cluster="lab"
    )
    story.until_batch(BUSY_AT)
    trouble.comes(lab, story)
    story.wait()
    assert tuple(story.causes) == trouble.causes, story.logged
    assert story.describe()["state"] == "COMPLETED"
    return story
