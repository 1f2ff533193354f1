"""What a trial trained with, as far as advice depends on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hpc_det.config.merge import Tree
from hpc_det.node.json_files import checked
from hpc_det.store.experiment_config import read_secrets
from hpc_det.store.folders import TrialFolder
from hpc_det.view.state import ExperimentView
from hpc_det.view.trial_history import SPEC, read_tolerantly


@dataclass(frozen=True, kw_only=True)
class Conditions:
    config: Tree
    """The effective one."""
    hparams: dict[str, Any]
    slots: int
    scheduler: str
    cpus_per_rank: int
    shares_nodes: bool
    """Its job has a part of each node only, or shares what it has with other trials."""

    def value(self, path: str, default: Any) -> Any:
        """Of the configuration, by dotted path."""
        found: Any = self.config
        for key in path.split("."):
            found = found.get(key) if isinstance(found, dict) else None
        return default if found is None else found


def conditions(view: ExperimentView, trial: TrialFolder) -> Conditions:
    """Raises HpcDetError where the files of the experiment are damaged."""
    plan, cluster = view.plan(), _cluster(view)
    per_node = cluster.get("slots_per_node") or plan.ranks_per_node
    return Conditions(
        config=view.config,
        hparams=(read_tolerantly(trial.trial, SPEC) or {"hparams": {}})["hparams"],
        slots=plan.world_size,
        scheduler=plan.scheduler,
        cpus_per_rank=plan.cpus_per_rank,
        shares_nodes=plan.ranks_per_node < max(per_node, plan.job_slots_per_node),
    )


def _cluster(view: ExperimentView) -> dict[str, Any]:
    """The profile. Raises DamagedFile."""
    file = view.folder.cluster
    found = checked(read_secrets(file) or {}, {}, file)
    return checked(found, {"slots_per_node": int | None} if "slots_per_node" in found else {}, file)
