"""The launchers and the fields of `hydra.launcher`.

Every Hydra app of this Python imports this module, so it is small.
"""

from dataclasses import dataclass, field
from typing import Any, Optional

from hydra.core.config_store import ConfigStore

from hpc_det.sweep.launcher import SweepLauncher


class HpcSlurmLauncher(SweepLauncher):
    scheduler = "slurm"


class HpcPbsLauncher(SweepLauncher):
    scheduler = "pbs"


class HpcLocalLauncher(SweepLauncher):
    scheduler = "local"


@dataclass
class HpcLauncherConf:
    """The fields of `hydra.launcher`, which all three launchers have."""

    cluster: Optional[str] = None  # noqa: UP045  # OmegaConf 2.3 reads no other spelling with Python 3.10
    """Name of a cluster profile, as `hpc-det cluster list` shows it; None chooses one as `hpc-det experiment create`
    does, among the profiles of the launcher's scheduler."""
    slots: int = 1
    """Number of ranks of each point."""
    time_limit: Any = None
    """Time limit of a job: minutes or "HH:MM:SS" (quoted in YAML); None uses the cluster profile's."""
    resource_pool: Optional[str] = None  # noqa: UP045
    """Partition or queue; None uses the cluster profile's."""
    cpus_per_slot: Optional[int] = None  # noqa: UP045
    """CPUs of each slot; None uses the cluster profile's."""
    memory_per_slot: Optional[str] = None  # noqa: UP045
    """Memory of each slot, such as 16G; None uses the cluster profile's memory of a node."""
    account: Optional[str] = None  # noqa: UP045
    """Account that jobs are charged to; None uses the cluster profile's."""
    qos: Optional[str] = None  # noqa: UP045
    """Quality of service; None uses the cluster profile's."""
    constraint: Optional[str] = None  # noqa: UP045
    """Features that nodes must have."""
    array_parallelism: int = 0
    """Largest number of points that run at the same time; 0: no limit."""
    packed_slots: Optional[int] = None  # noqa: UP045
    """Number of slots of one job that runs all points; None submits a job for each point."""
    max_restarts: int = 0
    """How often a failed point is restarted. Preemptions do not count."""
    sbatch_args: list[str] = field(default_factory=list)
    """Further options of sbatch, on Slurm."""
    environment_variables: dict[str, str] = field(default_factory=dict)
    """Environment variables of the ranks."""
    wait: bool = True
    """Whether the launcher waits until all points have ended and returns their values; False: it returns at once."""
    poll_s: float = 2.0
    """Seconds between two checks while waiting."""


@dataclass
class HpcSlurmConf(HpcLauncherConf):
    _target_: str = "hydra_plugins.hpc_launcher.launchers.HpcSlurmLauncher"


@dataclass
class HpcPbsConf(HpcLauncherConf):
    _target_: str = "hydra_plugins.hpc_launcher.launchers.HpcPbsLauncher"


@dataclass
class HpcLocalConf(HpcLauncherConf):
    _target_: str = "hydra_plugins.hpc_launcher.launchers.HpcLocalLauncher"
    cluster: Optional[str] = "local"  # noqa: UP045
    poll_s: float = 0.2


for name, conf in {"hpc_slurm": HpcSlurmConf, "hpc_pbs": HpcPbsConf, "hpc_local": HpcLocalConf}.items():
    ConfigStore.instance().store(group="hydra/launcher", name=name, node=conf, provider="hpc_det")
