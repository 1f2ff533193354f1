"""Which folder a driver's run has: the one that the user names, the job's, or one that is gone with the driver."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_det.node.files import make_private
from hpc_det.store.experiments import state_root
from hpc_det.store.run_folder import RunFolder


@dataclass(frozen=True)
class Run:
    folder: RunFolder
    is_temporary: bool

    def goes_with_driver(self) -> None:
        """A temporary one: agents may remove it when its driver has died."""
        if self.is_temporary:
            self.folder.temporary.touch(mode=0o600)

    def kept(self) -> Run:
        """This run, as one that stays when its driver ends."""
        self.folder.temporary.unlink(missing_ok=True)
        return replace(self, is_temporary=False)

    def remove_if_temporary(self) -> None:
        if self.is_temporary:
            shutil.rmtree(self.folder.path, ignore_errors=True)


def run_of(wanted: str | os.PathLike[str] | None, env: Mapping[str, str]) -> Run:
    """The one at `path_of(wanted)`. None: inside a job one of its own, for each driver of the job in order, so that a
    requeued job finds it again; else a temporary one. Raises UsageError where it cannot be the user's alone.
    """
    if wanted is None and (job := _job(env)) is not None:
        wanted = f"{job}-{next(_drivers)}"
    if wanted is None:
        make_private(_root(env))
        run = Run(RunFolder(Path(tempfile.mkdtemp(prefix="tmp-", dir=_root(env)))), is_temporary=True)
    else:
        run = Run(RunFolder(path_of(wanted, env)), is_temporary=False)
    run.folder.make()
    return run


def path_of(run: str | os.PathLike[str], env: Mapping[str, str]) -> Path:
    """A name lies below `$HPC_DET_ROOT/sgd`, anything with a slash is a path."""
    path = os.fspath(run)
    return Path(path).expanduser().absolute() if os.sep in path else _root(env) / path


def _root(env: Mapping[str, str]) -> Path:
    return state_root(env) / "sgd"


_drivers = itertools.count(1)
"""Of this process."""


def _job(env: Mapping[str, str]) -> str | None:
    """A requeued job keeps its number."""
    for scheduler, variable in (("slurm", "SLURM_JOB_ID"), ("pbs", "PBS_JOBID")):
        if variable in env:
            return f"{scheduler}-{env[variable]}"
    return None
