"""Where the checkpoints of an experiment will lie, if not in its own folder.

They get a folder `NUMBER-XXXXXXXX` below what checkpoint_storage names, with eight random digits: several users and
state roots share a file system or a bucket, and numbers come again where somebody has deleted an experiment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_det.config.storage import SharedFs, store_url
from hpc_det.errors import UsageError
from hpc_det.node.json_files import write_json
from hpc_det.plan.container import checkpoint_folder
from hpc_det.store.folders import ExperimentFolder

if TYPE_CHECKING:
    from hpc_det.plan.effective import Effective

_LIBRARIES = {"s3": "s3fs", "gcs": "gcsfs", "azure": "adlfs"}


def check_storage(effective: Effective) -> None:
    """Raises UsageError where no checkpoint could be put; the store itself is not asked."""
    problems = [*_missing_libraries(effective), *_folder_problems(effective)]
    if problems:
        raise UsageError(problems)


def make_storage(effective: Effective, experiment: ExperimentFolder) -> None:
    """Write down the place of this experiment and, where it is a folder, make it. Raises UsageError if that fails."""
    name = f"{experiment.id}-{os.urandom(4).hex()}"
    if url := store_url(effective.experiment.checkpoint_storage):
        write_json(experiment.storage, {"url": f"{url}/{name}"})
    if folder := checkpoint_folder(effective.experiment, effective.cluster):
        write_json(experiment.storage, {"folder": str(folder / name)})
        try:
            experiment.make_elsewhere(folder / name)
        except OSError as error:
            raise UsageError(f"checkpoint_storage: {folder / name} cannot be made: {error.strerror}") from None


def _missing_libraries(effective: Effective) -> Iterator[str]:
    kind = effective.experiment.checkpoint_storage.type
    missing = [name for name in ("fsspec", _LIBRARIES.get(kind or "")) if name and find_spec(name) is None]
    if kind in _LIBRARIES and missing:
        yield (
            f"checkpoint_storage.type: {kind!r} needs {' and '.join(missing)}, which {sys.executable} does not have; "
            f"run `{sys.executable} -m pip install 'hpc_det[cloud]'`"
        )


def _folder_problems(effective: Effective) -> Iterator[str]:
    folder = checkpoint_folder(effective.experiment, effective.cluster)
    if folder is None:
        return
    storage = effective.experiment.checkpoint_storage
    key = "host_path" if isinstance(storage, SharedFs) else "container_path"
    # Only storage_path is made where it is not there.
    base = Path(storage.host_path) if isinstance(storage, SharedFs) else folder
    there = next((path for path in (folder, *folder.parents) if path.exists()), base)
    if not base.is_dir() or not there.is_dir():
        wrong = base if not base.is_dir() else there
        yield (
            f"checkpoint_storage.{key}: {str(wrong)!r} is no folder on this machine; name one that this machine and "
            f"all nodes see, since hpc-det reads checkpoints from both"
        )
    elif not os.access(there, os.W_OK | os.X_OK):
        yield f"checkpoint_storage.{key}: {str(there)!r} may not be written; name a folder that you may write"
