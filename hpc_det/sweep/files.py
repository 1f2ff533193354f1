"""The files of a sweep of a Hydra app, in the folder of its experiment.

  sweep/app.pkl     the app's function and Hydra's state        the launcher
        import_path where the app imported its modules from     "
        points.json overrides of each point, and its config     "
        configs/1.pkl a composed config, of one or many points  "
        returns/1.pkl the JobReturn of a point                  rank 0 of its gang
                1.json its output folder and return value       "

All except the JSON files are sealed with the user's key (hpc_det.node.key). hydra.sweep.dir has a file hpc_det.json
with the numbers of its experiments, with which `hpc-det sweep` finds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hpc_det.errors import UsageError
from hpc_det.node.json_files import read_json, write_json
from hpc_det.node.key import derived, read_with_seal, user_key, write_with_seal
from hpc_det.store.experiments import ExperimentStore
from hpc_det.store.folders import ExperimentFolder

POINTER = "hpc_det.json"
"""File in hydra.sweep.dir with the numbers of the sweep's experiments, and the folder that contains them."""


@dataclass(frozen=True)
class SweepFiles:
    """The files of one sweep; the module's docstring lists them."""

    experiment: ExperimentFolder

    @property
    def path(self) -> Path:
        return self.experiment.sweep

    @property
    def app(self) -> Path:
        return self.path / "app.pkl"

    @property
    def import_path(self) -> Path:
        return self.path / "import_path"

    @property
    def points(self) -> Path:
        return self.path / "points.json"

    def config(self, number: int) -> Path:
        return self.path / "configs" / f"{number}.pkl"

    def returned(self, trial: int) -> Path:
        return self.path / "returns" / f"{trial}.pkl"

    def shown(self, trial: int) -> Path:
        return self.path / "returns" / f"{trial}.json"

    def write(self, path: Path, content: bytes) -> None:
        """Write `content` to a file, with the seal that `read` requires."""
        write_with_seal(path, content, self._key)

    def read(self, path: Path) -> bytes:
        """Return the content of a sealed file. Raises HpcDetError if this user has not written it, FileNotFoundError if
        it is missing.
        """
        return read_with_seal(path, self._key)

    @cached_property
    def _key(self) -> bytes:
        return derived(user_key(self.experiment.root() / "key"), f"sweep {self.experiment.id}")

    def create(self) -> None:
        """Create the folders, which must not exist."""
        for folder in (self.path, self.path / "configs", self.path / "returns"):
            folder.mkdir(mode=0o700)

    def read_points(self) -> list[dict[str, Any]]:
        """Return {"num", "overrides", "config"} of each point. Raises UsageError if the experiment is not a sweep."""
        found: list[dict[str, Any]] | None = read_json(self.points)
        if found is None:
            raise UsageError(f"experiment {self.experiment.id}: not a sweep of a Hydra app; see `hpc-det experiment`")
        return found


def point_to(experiment: ExperimentFolder, sweep_dir: Path) -> None:
    """Record the experiment in the sweep folder, so that `hpc-det sweep` finds it."""
    # Experiments below another $HPC_DET_ROOT are dropped: the file names one root for all numbers.
    known = read_json(sweep_dir / POINTER) or {"experiments": []}
    root = str(experiment.root())
    numbers = known["experiments"] if known.get("root") == root else []
    write_json(sweep_dir / POINTER, {"root": root, "experiments": [*numbers, experiment.id]})


def experiments_of(sweep_dir: Path) -> list[ExperimentFolder]:
    """Return the experiments of this hydra.sweep.dir, oldest first, without deleted ones. Raises UsageError if there
    are none.
    """
    known = read_json(sweep_dir / POINTER)
    if known is None:
        raise UsageError(
            f"{sweep_dir}: has no {POINTER}; give the hydra.sweep.dir of a sweep that a launcher of hpc_det began, or "
            f"the experiment's number"
        )
    store = ExperimentStore(Path(known["root"]))
    found = [folder for folder in map(store.folder, known["experiments"]) if folder.config.exists()]
    if not found:
        numbers = ", ".join(map(str, known["experiments"]))
        raise UsageError(f"{sweep_dir}: none of its experiments is left below {store.root}: {numbers}")
    return found
