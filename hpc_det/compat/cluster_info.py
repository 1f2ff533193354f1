"""det.get_cluster_info(): what code that runs inside an experiment may ask about it (upstream: determined/_info.py)."""

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
    trial_id: int
    experiment_id: int
    trial_seed: int
    hparams: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ClusterInfo:
    """Of upstream's attributes those that have a true value here; of the others an AttributeError says so."""

    trial: TrialInfo
    latest_checkpoint: str | None
    """UUID of the newest checkpoint when this process first asked; None at the beginning of a trial."""
    slot_ids: list[int]
    """This node's slots, counted from zero."""
    container_rank: int
    """This node's rank."""
    user_data: dict[str, Any]
    """The section `data` of the experiment."""
    task_type: str = "TRIAL"

    @classmethod
    def of(cls, attempt: Attempt) -> ClusterInfo:
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
    """The experiment that this process belongs to; None outside of any. The same answer as long as the process runs."""
    return _asked_once() if Attempt.is_in(os.environ) else None


@functools.cache
def _asked_once() -> ClusterInfo:
    return ClusterInfo.of(Attempt.from_env(os.environ))
