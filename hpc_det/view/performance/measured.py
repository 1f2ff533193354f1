"""All measurements of a trial: its profile, and the times of validations and saves, which every trial records."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

from hpc_det.config.merge import Tree, value_at
from hpc_det.node.json_files import checked
from hpc_det.store.experiment_config import read_secrets
from hpc_det.store.folders import TrialFolder
from hpc_det.store.metrics import each
from hpc_det.store.save_times import Save, read_each_save
from hpc_det.view.metric_history import MetricHistory
from hpc_det.view.performance.system import NodeUse, Usages, read_system
from hpc_det.view.performance.timings import Spent, Stretch, read_timings, samples_per_second, total
from hpc_det.view.state import ExperimentView
from hpc_det.view.trial_history import SPEC, read_tolerantly


@dataclass(frozen=True, kw_only=True)
class Pauses:
    """Number and duration of one kind of pause in training."""

    count: int = 0
    seconds: float = 0.0

    @property
    def mean_s(self) -> float:
        return self.seconds / self.count if self.count else 0.0


@dataclass(frozen=True, kw_only=True)
class Measured:
    """All measurements of a trial."""

    timings: dict[int, list[Stretch]] = field(default_factory=dict)
    """The stretches of each rank, keyed by rank; empty if the trial was not profiled."""
    nodes: list[NodeUse] = field(default_factory=list)
    validations: Pauses = field(default=Pauses())
    saves: Pauses = field(default=Pauses())
    postponed_saves: int = 0
    """Number of saves that had to wait until the previous one was written."""
    unprofiled: Spent | None = None
    """Time of rank 0 as known without a profile: validations and saves, with all the rest counted as train_batch.

    None before the first report.
    """

    @cached_property
    def ranks(self) -> list[Spent]:
        """The profiled time of each rank; empty if the trial was not profiled."""
        return [total(stretches) for stretches in self.timings.values()]

    @property
    def known_ranks(self) -> list[Spent]:
        """The profiled time of each rank or, without a profile, `unprofiled`."""
        return self.ranks or [spent for spent in [self.unprofiled] if spent]

    @property
    def samples_per_second(self) -> float | None:
        """Samples per second of all ranks together; None if the trial was not profiled."""
        stretches = next(iter(self.timings.values()), [])
        return samples_per_second(stretches)

    def gpus(self) -> list[Usages]:
        """Return the busiest GPUs of each host, as many as it has ranks: other jobs may use further GPUs of a node."""
        ranks = Counter(rank.host for rank in self.ranks)
        return [gpu for node in self.nodes for gpu in node.busiest_gpus(ranks[node.host] or None)]


def measured(trial: TrialFolder, history: MetricHistory | None = None) -> Measured:
    """Return the measurements in the files of a trial. `history`: its metrics, if they were read already."""
    saves = read_each_save(trial.saves)
    history = history or MetricHistory(each(trial.metrics))
    attempts = history.attempts.values()
    validated = Pauses(
        count=sum(len(attempt.validation_s) for attempt in attempts),
        seconds=sum(sum(attempt.validation_s) for attempt in attempts),
    )
    saved = Pauses(count=len(saves), seconds=sum(save.stall_s for save in saves))
    return Measured(
        timings=read_timings(trial.profile),
        nodes=read_system(trial.profile),
        validations=validated,
        saves=saved,
        postponed_saves=sum(save.postponed for save in saves),
        unprofiled=_unprofiled(history, saves, validated, saved),
    )


def _unprofiled(history: MetricHistory, saves: Sequence[Save], validated: Pauses, saved: Pauses) -> Spent | None:
    """Return the time of all training, including batches that were lost; None before the first report."""
    wall_s = sum(_attempts_s(history, saves))
    if all(attempt.reached < 0 for attempt in history.attempts.values()) or wall_s <= 0:
        return None
    left_s = max(wall_s - validated.seconds - saved.seconds, 0.0)
    seconds = {"validation": validated.seconds, "checkpoint": saved.seconds, "train_batch": left_s}
    return Spent(rank=0, host="", count=history.batches, records=0, wall_s=wall_s, seconds=seconds, exposed_s=None)


def _attempts_s(history: MetricHistory, saves: Sequence[Save]) -> Iterator[float]:
    """Yield for each attempt the seconds from the start of training to its last line or save.

    Both times are from the clock of the attempt's host.
    """
    begun = [(attempt.began, attempt.last) for attempt in history.attempts.values() if attempt.began is not None]
    for (began, last), (until, _) in pairwise([*begun, (math.inf, 0.0)]):
        ends = (save.began + save.stall_s for save in saves if began <= save.began < until)
        yield max([last, *ends]) - began


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The facts about a trial, besides measurements, on which advice depends."""

    config: Tree
    """The effective configuration."""
    hparams: dict[str, Any]
    slots: int
    nodes: int
    scheduler: str
    cpus_per_rank: int
    shares_nodes: bool
    """True if its job has only part of each node, or shares its allocation with other trials."""

    def value(self, path: str, default: Any) -> Any:
        """Return a value of the configuration by its dotted path, or `default` if it is not set or null."""
        found = value_at(self.config, *path.split("."))
        return default if found is None else found


def conditions(view: ExperimentView, trial: TrialFolder) -> Conditions:
    """Return the conditions of a trial. Raises HpcDetError if files of the experiment are damaged."""
    plan, cluster = view.plan(), _cluster(view)
    per_node = cluster.get("slots_per_node") or plan.ranks_per_node
    return Conditions(
        config=view.config,
        hparams=(read_tolerantly(trial.trial, SPEC) or {"hparams": {}})["hparams"],
        slots=plan.world_size,
        nodes=plan.nodes,
        scheduler=plan.scheduler,
        cpus_per_rank=plan.cpus_per_rank,
        shares_nodes=plan.ranks_per_node < max(per_node, plan.job_slots_per_node),
    )


def _cluster(view: ExperimentView) -> dict[str, Any]:
    """Return the cluster profile. Raises DamagedFile."""
    file = view.folder.cluster
    found = checked(read_secrets(file) or {}, {}, file)
    return checked(found, {"slots_per_node": int | None} if "slots_per_node" in found else {}, file)
