"""The names of all files of a driver's run (hpc_det.sgd), and who writes each.

RUN/key                         the secret of the run          the driver, once
    drivers/3.json              whose run it is: the highest   whoever wants to drive it
    driver.json                 where the driver listens       the driver
    temporary                   to go with its driver          the driver
    round                       which round has ended last     the driver; see hpc_det.sgd.driver.rounds
    nodes/NODE                  from where its agent comes     the node's agent
    snapshots/12/               what is trained, durable       the driver commits; see hpc_det.checkpoint.snapshots
    logs/generation-3/rank-0.log                               the rank
    logs/node-NODE.log                                         the node's agent
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from hpc_det.errors import UsageError
from hpc_det.node.files import make_private
from hpc_det.node.key import user_key


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
