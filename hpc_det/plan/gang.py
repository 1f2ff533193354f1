"""Slots to nodes x ranks.

Determined schedules any number of slots within one node and only whole nodes beyond; a request that fits neither "waits
indefinitely" there (its guide, *Scheduling Behavior*). Here it is an error that names what would fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_det.errors import UsageError

if TYPE_CHECKING:
    from hpc_det.config.cluster import Cluster


@dataclass(frozen=True, kw_only=True)
class Gang:
    nodes: int
    ranks_per_node: int


def gang(slots: int, cluster: Cluster, path: str = "resources.slots_per_trial") -> Gang:
    """Raises UsageError, naming `path`, when `slots` fills no whole nodes, or more nodes than the cluster has."""
    per_node = cluster.slots_per_node
    if slots <= per_node:
        return Gang(nodes=1, ranks_per_node=slots)
    if cluster.max_nodes is not None and slots > cluster.max_nodes * per_node:
        raise UsageError(
            f"{path}: {slots} is more than cluster '{cluster.name}' has, {cluster.max_nodes} "
            f"node(s) of {per_node} slots; use at most {cluster.max_nodes * per_node}"
        )
    if slots % per_node:
        low = slots - slots % per_node
        raise UsageError(
            f"{path}: {slots} does not fill whole nodes of {per_node} slots on cluster "
            f"'{cluster.name}'; use {low} or {low + per_node}"
        )
    return Gang(nodes=slots // per_node, ranks_per_node=per_node)
