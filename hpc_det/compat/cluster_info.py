"""det.get_cluster_info(): facts about the experiment for code that runs in it (upstream: determined/_info.py)."""

from __future__ import annotations

import functools
import json
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hpc_det.compat.aliases import missing
from hpc_det.launch.determined_variables import latest_checkpoint, newest_checkpoint
from hpc_det.node.gpus import NvmlError, cuda_devices
from hpc_det.node.json_files import read_json
from hpc_det.store.attempt import Attempt


@dataclass(frozen=True, kw_only=True)
class TrialInfo:
    """The numbers, the seed and the hyperparameters of the trial."""

    trial_id: int
    experiment_id: int
    trial_seed: int
    hparams: dict[str, Any]
    _config: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The effective configuration."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(missing(f"determined.TrialInfo.{name}"))


@dataclass(frozen=True, kw_only=True)
class ClusterInfo:
    """The trial and this node's part of the gang.

    Attributes are those of Determined's class that have a meaning without a master. Any other raises an AttributeError
    that names docs/how-to/port-from-determined.md.
    """

    trial: TrialInfo
    latest_checkpoint: str | None
    """UUID of the newest checkpoint at the first call in this process.

    Before the first one, the checkpoint of another trial that this one starts from; None without both.
    """
    slot_ids: list[int]
    """Numbers of this node's slots, counted from zero."""
    container_rank: int
    """Rank of this node among the nodes of the gang."""
    user_data: dict[str, Any]
    """Section `data` of the experiment."""
    container_addrs: list[str]
    """Addresses of the nodes of the gang, by rank of the node."""
    container_slot_counts: list[int]
    """Numbers of slots of the nodes of the gang, by rank of the node."""
    agent_id: str
    """Host name of this node."""
    allocation_id: str
    """Experiment, trial and attempt, such as 12.1.3."""
    task_type: str = "TRIAL"

    @classmethod
    def of(cls, attempt: Attempt) -> ClusterInfo:
        """Return the facts about this attempt, read from the trial's folder."""
        spec = json.loads(attempt.trial.trial.read_text(encoding="utf-8"))
        return cls(
            trial=trial_info(spec),
            latest_checkpoint=latest_checkpoint(newest_checkpoint(attempt.trial.checkpoints), spec),
            slot_ids=[*range(attempt.ranks_per_node)],
            container_rank=attempt.node_rank,
            user_data=spec["config"]["data"],
            container_addrs=_addresses(attempt),
            container_slot_counts=[attempt.ranks_per_node] * attempt.nodes,
            agent_id=socket.gethostname(),
            allocation_id=f"{spec['experiment_id']}.{spec['trial_id']}.{attempt.number}",
        )

    @property
    def gpu_uuids(self) -> list[str]:
        """UUIDs of the GPUs that this process sees; [] without GPUs."""
        with suppress(NvmlError):
            return [device.uuid for device in cuda_devices(os.environ)]
        return []

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(missing(f"determined.ClusterInfo.{name}"))


def trial_info(spec: Mapping[str, Any]) -> TrialInfo:
    """Return the facts in `spec`, the content of trial.json."""
    names = ("trial_id", "experiment_id", "trial_seed", "hparams")
    return TrialInfo(**{name: spec[name] for name in names}, _config=spec["config"])


def _addresses(attempt: Attempt) -> list[str]:
    """Return the addresses of the nodes; the scheduler's names of hosts for others than this node and rank 0's."""
    hosts = read_json(attempt.trial.nodes(attempt.number)) or []
    known = {attempt.node_rank: attempt.address, 0: attempt.master_addr}
    return [known.get(node) or (hosts[node] if node < len(hosts) else f"node-{node}") for node in range(attempt.nodes)]


def get_cluster_info() -> ClusterInfo | None:
    """Return the facts about the experiment that this process runs in, or None outside of an experiment."""
    return _asked_once() if Attempt.is_in(os.environ) else None


@functools.cache  # a checkpoint that is saved meanwhile must not change `latest_checkpoint` within a process
def _asked_once() -> ClusterInfo:
    return ClusterInfo.of(Attempt.from_env(os.environ))
