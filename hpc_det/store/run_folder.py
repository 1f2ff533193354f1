"""The folder of a driver's run (hpc_det.sgd): which one it is, the names of its files, and who writes each.

It is the one that the user names, the job's, or one that is removed with the driver.

RUN/key                         the secret of the run          the driver, once
    drivers/3.json              whose run it is: the highest   whoever wants to drive it
    driver.json                 where the driver listens       the driver
    temporary                   to go with its driver          the driver
    round                       which round has ended last     the driver; see hpc_det.sgd.driver.calls
    nodes/NODE                  from where its agent comes     the node's agent
    snapshots/12/               what is trained, durable       the driver commits; see hpc_det.checkpoint.snapshots
    logs/generation-3/rank-0.log                               the rank
    logs/node-NODE.log                                         the node's agent
"""

from __future__ import annotations

import itertools
import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_det.errors import UsageError
from hpc_det.node import disk
from hpc_det.node.files import make_private
from hpc_det.node.key import user_key
from hpc_det.store.experiments import state_root

_drivers = itertools.count(1)
"""Of this process."""


@dataclass(frozen=True)
class RunFolder:
    path: Path

    def make(self) -> None:
        """Where it is missing. Raises UsageError where it cannot be the user's alone: it holds what ranks will run."""
        try:
            for folder in (self.path, self.drivers, self.nodes, self.snapshots, self.logs):
                make_private(folder)
            status = self.path.stat()
        except OSError as error:
            raise UsageError(
                f"{error.filename}: {error.strerror}; a run needs a folder of yours that all nodes see"
            ) from None
        mode = stat.S_IMODE(status.st_mode)
        if mode & 0o077 or status.st_uid != os.geteuid():
            raise UsageError(
                f"{self.path}: mode {mode:04o}, of user {status.st_uid}; a run folder has 0700, of user "
                f"{os.geteuid()}: `chmod 700 {self.path}`, or name one that does not exist yet"
            )

    def key(self) -> bytes:
        """Made at the first call."""
        return user_key(self.path / "key")

    @property
    def drivers(self) -> Path:
        return self.path / "drivers"

    @property
    def driver(self) -> Path:
        return self.path / "driver.json"

    @property
    def temporary(self) -> Path:
        return self.path / "temporary"

    @property
    def round(self) -> Path:
        return self.path / "round"

    @property
    def nodes(self) -> Path:
        return self.path / "nodes"

    @property
    def snapshots(self) -> Path:
        return self.path / "snapshots"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def rank_log(self, generation: int, rank: int) -> Path:
        return self.logs / f"generation-{generation}" / f"rank-{rank}.log"

    def node_log(self, node: str) -> Path:
        return self.logs / f"node-{node}.log"


@dataclass(frozen=True)
class DriverRun:
    folder: RunFolder
    is_temporary: bool

    def goes_with_driver(self) -> None:
        """A temporary one: agents may remove it when its driver has died."""
        if self.is_temporary:
            disk.make_empty(self.folder.temporary, 0o600)

    def kept(self) -> DriverRun:
        """This run, as one that stays when its driver ends."""
        disk.unlink(self.folder.temporary, missing_ok=True)
        return replace(self, is_temporary=False)

    def remove_if_temporary(self) -> None:
        if self.is_temporary:
            disk.remove_tree(self.folder.path)


def run_of(wanted: str | os.PathLike[str] | None, env: Mapping[str, str]) -> DriverRun:
    """The one at `path_of(wanted)`. None: inside a job one of its own, for each driver of the job in order, so that a
    requeued job finds it again; else a temporary one. Raises UsageError where it cannot be the user's alone.
    """
    if wanted is None and (job := _job(env)) is not None:
        wanted = f"{job}-{next(_drivers)}"
    if wanted is None:
        make_private(_root(env))
        run = DriverRun(RunFolder(Path(tempfile.mkdtemp(prefix="tmp-", dir=_root(env)))), is_temporary=True)
    else:
        run = DriverRun(RunFolder(path_of(wanted, env)), is_temporary=False)
    run.folder.make()
    return run


def path_of(run: str | os.PathLike[str], env: Mapping[str, str]) -> Path:
    """A name lies below `$HPC_DET_ROOT/sgd`, anything with a slash is a path."""
    path = os.fspath(run)
    return Path(path).expanduser().absolute() if os.sep in path else _root(env) / path


def _root(env: Mapping[str, str]) -> Path:
    return state_root(env) / "sgd"


def _job(env: Mapping[str, str]) -> str | None:
    """A requeued job keeps its number."""
    for scheduler, variable in (("slurm", "SLURM_JOB_ID"), ("pbs", "PBS_JOBID")):
        if variable in env:
            return f"{scheduler}-{env[variable]}"
    return None
