"""det.get_cluster_info(): facts about the experiment for code that runs in it (upstream: determined/_info.py)."""

from __future__ import annotations

import functools
import json
import os
from dataclasses import dataclass
from typing import Any

from hpc_det.checkpoint.committed import committed
from hpc_det.compat.aliases import missing
from hpc_det.store.attempt import Attempt


@dataclass(frozen=True, kw_only=True)
class TrialInfo:
    """The numbers, the seed and the hyperparameters of the trial."""

    trial_id: int
    experiment_id: int
    trial_seed: int
    hparams: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ClusterInfo:
    """The trial and this node's part of the gang.

    Attributes are those of Determined's class that have a meaning without a master. Any other raises an AttributeError
    that names docs/how-to/port-from-determined.md.
    """

    trial: TrialInfo
    latest_checkpoint: str | None
    """UUID of the newest checkpoint at the first call in this process; None if the trial has no checkpoint."""
    slot_ids: list[int]
    """Numbers of this node's slots, counted from zero."""
    container_rank: int
    """Rank of this node among the nodes of the gang."""
    user_data: dict[str, Any]
    """Section `data` of the experiment."""
    task_type: str = "TRIAL"

    @classmethod
    def of(cls, attempt: Attempt) -> ClusterInfo:
        """Return the facts about this attempt, read from the trial's folder."""
        spec = json.loads(attempt.trial.trial.read_text(encoding="utf-8"))
        checkpoints = committed(attempt.trial.checkpoints)
        return cls(
            trial=TrialInfo(**{name: spec[name] for name in TrialInfo.__dataclass_fields__}),
            latest_checkpoint=checkpoints[0].uuid if checkpoints else None,
            slot_ids=[*range(attempt.ranks_per_node)],
            container_rank=attempt.node_rank,
            user_data=spec["config"]["data"],
        )

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(missing(f"ClusterInfo.{name}"))


def get_cluster_info() -> ClusterInfo | None:
    """Return the facts about the experiment that this process runs in, or None outside of an experiment."""
    return _asked_once() if Attempt.is_in(os.environ) else None


@functools.cache  # a checkpoint that is saved meanwhile must not change `latest_checkpoint` within a process
def _asked_once() -> ClusterInfo:
    return ClusterInfo.of(Attempt.from_env(os.environ))
