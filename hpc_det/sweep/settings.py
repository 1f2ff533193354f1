"""The fields of hydra.launcher, and the experiment that they ask for."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_det.config.merge import Tree
from hpc_det.config.plain_yaml import load_yaml
from hpc_det.config.request import Request, find
from hpc_det.errors import UsageError
from hpc_det.plan.effective import Effective, effective

ENTRYPOINT = [sys.executable, "-m", "hpc_det.launch.torch_distributed", "-m", "hpc_det.sweep.app"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    scheduler: str
    """Of the launcher: the cluster must have the same."""
    cluster: str
    slots: int
    time_limit: str | int | None
    resource_pool: str | None
    array_parallelism: int
    packed_slots: int | None
    max_restarts: int
    sbatch_args: Sequence[str]
    environment_variables: Mapping[str, Any]
    wait: bool
    poll_s: float

    def effective(
        self, name: str, folder: Path, overrides: Sequence[Sequence[str]], env: Mapping[str, str]
    ) -> Effective:
        """An experiment of this name with a trial for each list of overrides, started in `folder`.

        Raises UsageError with all that is wrong.
        """
        cluster = load_yaml(find("cluster", self.cluster, env))
        if cluster.get("scheduler") != self.scheduler:
            raise UsageError(
                f"hydra.launcher.cluster: {self.cluster!r} has the scheduler {cluster.get('scheduler')}, this launcher "
                f"is for {self.scheduler}; choose hydra/launcher=hpc_{cluster.get('scheduler')}, or another cluster"
            )
        request = Request(
            cluster=cluster, template=None, template_name=None, config=self._config(name), context_dir=folder
        )
        found = effective(request)
        points: list[Tree] = [{"hyperparameters": dict(map(_split, point))} for point in overrides]
        return replace(found, points=points)

    def _config(self, name: str) -> Tree:
        most = self.array_parallelism * self.slots
        return {
            "name": name,
            "entrypoint": ENTRYPOINT,
            "searcher": {"name": "single", "metric": "return value"},
            "max_restarts": self.max_restarts,
            "resources": {
                "slots_per_trial": self.slots,
                "time_limit": self.time_limit,
                "resource_pool": self.resource_pool,
                "packed_slots": self.packed_slots,
                "max_slots": most or None,
            },
            "slurm": {"sbatch_args": list(self.sbatch_args)},
            "environment": {
                "environment_variables": [f"{key}={value}" for key, value in self.environment_variables.items()]
            },
        }


def _split(override: str) -> tuple[str, str]:
    """As one would write it: the key with its sign, and the value."""
    key, _, value = override.partition("=")
    return key, value
