"""The folder of a driver's run (hpc_det.sgd): its path, the names of its files, and their writers.

The user may name it. Otherwise it belongs to the job or, outside of jobs, is temporary and deleted with the driver.

RUN/key                         the secret of the run          the driver, once
    drivers/3.json              claims; the highest one wins   each process that wants to be the driver
    driver.json                 the address of the driver      the driver
    temporary                   exists in a temporary folder   the driver
    round                       the round that ended last      the driver; see hpc_det.sgd.driver.calls
    nodes/NODE                  its agent's address and error  the node's agent; see hpc_det.sgd.elastic.check_in
    snapshots/12/               a snapshot of the training     the agent, or the driver without agents; see
                                                               hpc_det.checkpoint.snapshots
    experiment.json             its experiment                 the driver
    logs                        a link to the logs of that     "
    logs/attempt-3/rank-0.log   the output of a rank           the rank
    logs/node-NODE.log          the output of an agent         the node's agent

The trial of the experiment has the logs, the metrics and the attempts, so that they remain when a temporary run ends.
An attempt is one gang; attempts are numbered over all drivers of the run.
"""

from __future__ import annotations

import itertools
import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from hpc_det.errors import UsageError
from hpc_det.node import disk
from hpc_det.node.files import make_folders, make_private
from hpc_det.node.json_files import read_map
from hpc_det.node.key import user_key
from hpc_det.store.experiments import state_root

_drivers = itertools.count(1)
"""Numbers for the drivers of this process."""


@dataclass(frozen=True)
class RunFolder:
    """The files of one run."""

    path: Path

    def make(self) -> None:
        """Create the folder, if it is missing. Raises UsageError if other users have access to it."""
        make_run_folders(self.path)
        self._check_private()
        if self.logs != (own := self.path / "logs") and not self.logs.exists():
            disk.unlink(own, missing_ok=True)  # its experiment was deleted by hand
        make_run_folders(self.drivers, self.nodes, self.snapshots, self.logs)

    def _check_private(self) -> None:
        # Ranks run code from this folder
        status = self.path.stat()
        mode = stat.S_IMODE(status.st_mode)
        if mode & 0o077 or status.st_uid != os.geteuid():
            raise UsageError(
                f"{self.path}: mode {mode:04o}, owned by user {status.st_uid}; a run folder must have mode 0700 and be "
                f"owned by user {os.geteuid()}: run `chmod 700 {self.path}`, or name a folder that does not exist yet"
            )

    def key(self) -> bytes:
        """Return the secret of the run, which the first call creates."""
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
    def experiment(self) -> Path:
        """{"experiment": number}: the experiment of this run below the state root."""
        return self.path / "experiment.json"

    @property
    def logs(self) -> Path:
        """The folder of the logs: in the run, or in its experiment, where they outlive a temporary run."""
        own = self.path / "logs"
        try:
            return Path(os.readlink(own))
        except OSError:  # a folder, or missing
            return own

    def rank_log(self, attempt: int, rank: int) -> Path:
        return self.logs / f"attempt-{attempt}" / f"rank-{rank}.log"

    def node_log(self, node: str) -> Path:
        return self.logs / f"node-{node}.log"


@dataclass(frozen=True)
class DriverRun:
    """The run of a driver in this process."""

    folder: RunFolder
    is_temporary: bool
    """Whether the folder is deleted when the driver ends."""

    def goes_with_driver(self) -> None:
        """Mark a temporary folder, so that agents delete it if the driver is killed."""
        if self.is_temporary:
            disk.make_empty(self.folder.temporary, 0o600)

    def kept(self) -> DriverRun:
        """Return this run as one that is not deleted with its driver."""
        disk.unlink(self.folder.temporary, missing_ok=True)
        return replace(self, is_temporary=False)

    def remove_if_temporary(self) -> None:
        """Delete the folder if it is temporary."""
        if self.is_temporary:
            disk.remove_tree(self.folder.path)


def run_of(wanted: str | os.PathLike[str] | None, env: Mapping[str, str]) -> DriverRun:
    """Return the run in the folder `path_of(wanted)`, which is created if it is missing.

    None: in a job, one folder for each driver, numbered in the order of their start; otherwise a temporary folder.
    Raises UsageError if other users have access to the folder.
    """
    # A requeued job keeps its id and starts its drivers in the same order, so each driver finds its folder again.
    if wanted is None and (job := _job(env)) is not None:
        wanted = f"{job}-{next(_drivers)}"
    if wanted is None:  # outside of a job
        make_run_folders(_root(env))
        run = DriverRun(RunFolder(Path(tempfile.mkdtemp(prefix="tmp-", dir=_root(env)))), is_temporary=True)
    else:
        run = DriverRun(RunFolder(path_of(wanted, env)), is_temporary=False)
    run.folder.make()
    return run


def make_run_folders(*folders: Path) -> None:
    """Create folders of a run with mode 0700. Raises UsageError if that is not possible."""
    try:
        for folder in folders:
            make_private(folder)
    except OSError as error:
        problem = f"{error.filename}: {error.strerror}; a run needs a folder of yours that all nodes see"
        raise UsageError(problem) from None


def link_logs(run: Path, logs: Path) -> None:
    """Let the logs of a run be those of its experiment: `logs`, in which they stay when the run is deleted.

    If the run has logs already, for instance of an earlier version, `logs` becomes a link to these.
    """
    own = run / "logs"
    if logs.is_symlink() or (own.is_symlink() and Path(os.readlink(own)) == logs):
        return
    if own.is_symlink():
        disk.unlink(own)
    elif own.exists() and not disk.remove_empty(own):
        disk.symlink(logs, own)
        return
    make_folders(logs)
    disk.symlink(own, logs)


RunKind = Literal["trainer", "fit", "tune"]
_OF_GANG = ("drivers", "driver.json", "temporary", "round", "nodes", "snapshots", "logs", "jobs")
_FILES: dict[RunKind, tuple[str, ...]] = {
    "trainer": _OF_GANG,
    "fit": (*_OF_GANG, "checkpoints", "reports.jsonl", "finished.json"),
    "tune": ("driver.json", "effective.json", "search", "trainable.pkl", "import_path", "trials"),
}
"""The files of the runs of TorchTrainer, `fit` and `tune_run`, besides those of all."""
_SUBMITTED = "*_submitted.pkl"
"""Files of submitit in `jobs`: without one, no job was submitted, and the folder is the user's."""


def remove_run(run: Path, experiment: int, kind: RunKind) -> None:
    """Delete the run of an experiment: its own files, and the folder if it has no others.

    Does nothing if the run belongs to another experiment, or was deleted before.
    """
    if (read_map(RunFolder(run).experiment) or {}).get("experiment") != experiment:
        return
    for name in (*_FILES[kind], "key", "experiment.json"):  # the last one, so that a deletion can be repeated
        path = run / name
        if name == "jobs" and not any(path.glob(_SUBMITTED)):
            continue
        if path.is_dir() and not path.is_symlink():
            disk.remove_tree(path)
        else:
            disk.unlink(path, missing_ok=True)
    disk.remove_empty(run)  # unless it has files of the user


def path_of(run: str | os.PathLike[str], env: Mapping[str, str]) -> Path:
    """Return the folder of a run: a path if `run` contains a slash, otherwise a name below `$HPC_DET_ROOT/sgd`."""
    path = os.fspath(run)
    return Path(path).expanduser().absolute() if os.sep in path else _root(env) / path


def _root(env: Mapping[str, str]) -> Path:
    return state_root(env) / "sgd"


def _job(env: Mapping[str, str]) -> str | None:
    """Return the scheduler and the id of the job of this process; None outside of a job."""
    for scheduler, variable in (("slurm", "SLURM_JOB_ID"), ("pbs", "PBS_JOBID")):
        if variable in env:
            return f"{scheduler}-{env[variable]}"
    return None
