"""All that was measured of a trial: its profile, and what its validations and saves took, which every trial tells."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from hpc_det.checkpoint.saves import Save, read_each_save
from hpc_det.store.folders import TrialFolder
from hpc_det.store.metrics import BEGINS, Record, read_all
from hpc_det.view.profile.system import NodeUse, Usages, read_system
from hpc_det.view.profile.timings import Spent, Stretch, read_timings, samples_per_second, total


@dataclass(frozen=True, kw_only=True)
class Pauses:
    """How often training stood still for something, and how long."""

    count: int = 0
    seconds: float = 0.0

    @property
    def mean_s(self) -> float:
        return self.seconds / self.count if self.count else 0.0


@dataclass(frozen=True, kw_only=True)
class Measured:
    timings: dict[int, list[Stretch]] = field(default_factory=dict)
    """By rank; empty where the trial was not profiled."""
    nodes: list[NodeUse] = field(default_factory=list)
    validations: Pauses = field(default=Pauses())
    saves: Pauses = field(default=Pauses())
    unprofiled: Spent | None = None
    """Rank 0's time as validations and saves alone tell it: all that is left of it counts as train_batch."""

    @cached_property
    def ranks(self) -> list[Spent]:
        return [total(stretches) for stretches in self.timings.values()]

    @property
    def told(self) -> list[Spent]:
        """The time of all ranks, or what is known of it without a profile."""
        return self.ranks or [spent for spent in [self.unprofiled] if spent]

    @property
    def samples_per_second(self) -> float | None:
        """Of all ranks together."""
        stretches = next(iter(self.timings.values()), [])
        return samples_per_second(stretches)

    def gpus(self) -> list[Usages]:
        """Of each host as many as it has ranks, the busiest: a node may have more, and others at work there."""
        hosts = [rank.host for rank in self.ranks]
        return [gpu for node in self.nodes for gpu in node.busiest_gpus(hosts.count(node.host) or None)]


def measured(trial: TrialFolder) -> Measured:
    lines, saves = read_all(trial.metrics), read_each_save(trial.saves)
    validations = [line["seconds"] for line in lines if line["kind"] == "validation" and "seconds" in line]
    validated = Pauses(count=len(validations), seconds=sum(validations))
    saved = Pauses(count=len(saves), seconds=sum(save.stall_s for save in saves))
    return Measured(
        timings=read_timings(trial.profile),
        nodes=read_system(trial.profile),
        validations=validated,
        saves=saved,
        unprofiled=_unprofiled(lines, saves, validated, saved),
    )


def _unprofiled(lines: Sequence[Record], saves: Sequence[Save], validated: Pauses, saved: Pauses) -> Spent | None:
    """Of all that was trained, also what was lost. None before the first report."""
    last = next((line for line in reversed(lines) if line["kind"] != BEGINS), None)
    wall_s = sum(_attempts_s(lines, saves))
    if last is None or wall_s <= 0:
        return None
    left_s = max(wall_s - validated.seconds - saved.seconds, 0.0)
    seconds = {"validation": validated.seconds, "checkpoint": saved.seconds, "train_batch": left_s}
    return Spent(rank=0, host="", count=last["steps"], records=0, wall_s=wall_s, seconds=seconds, exposed_s=None)


def _attempts_s(lines: Sequence[Record], saves: Sequence[Save]) -> Iterator[float]:
    """How long each attempt trained, until it was last heard of, by the clock of its own host."""
    begins = [line for line in lines if line["kind"] == BEGINS]
    for begin, later in pairwise([*begins, None]):
        assert begin is not None
        until = later["time"] if later else math.inf
        heard = [line["time"] for line in lines if line["attempt"] == begin["attempt"]]
        heard += [save.began + save.stall_s for save in saves if begin["time"] <= save.began < until]
        yield max(heard) - begin["time"]
