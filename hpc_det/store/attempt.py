"""What an attempt is known by on every node and rank: the environment that the agent sets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpc_det.errors import HpcDetError
from hpc_det.store.folders import TrialFolder


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """The environment variables HPC_DET_*: the border between node and rank."""

    folder: str
    """The trial's."""
    number: int
    worker: int
    """Who trains, as the search knows it."""
    node_rank: int
    nodes: int
    ranks_per_node: int
    address: str
    """Of this node, as the others reach it."""
    master_addr: str
    master_port: int
    secret: str
    """Known to the ranks of this attempt alone: it seals the objects that they exchange. Never sent in clear."""
    socket: str
    """The agent's Unix socket in a folder of mode 0700 on this node."""

    @property
    def trial(self) -> TrialFolder:
        return TrialFolder(Path(self.folder))

    def to_env(self) -> dict[str, str]:
        return {f"HPC_DET_{name.upper()}": str(value) for name, value in vars(self).items()}

    def store_of_ranks(self) -> dict[str, str]:
        """For the ranks of one start of a launcher: the file that those of one node may meet in (core.gang_store)."""
        return {"HPC_DET_STORE": str(Path(self.socket).with_name(f"store-{os.getpid()}"))}

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Attempt:
        """Raises HpcDetError where no node agent set the variables."""
        try:
            values = {name: env[f"HPC_DET_{name.upper()}"] for name in cls.__dataclass_fields__}
        except KeyError as missing:
            raise HpcDetError(
                f"{missing.args[0]} is not set: this is started by a node agent; create an experiment with "
                f"`hpc-det experiment create`, or start the script with torchrun"
            ) from None
        return cls(
            folder=values["folder"],
            address=values["address"],
            master_addr=values["master_addr"],
            secret=values["secret"],
            socket=values["socket"],
            number=int(values["number"]),
            worker=int(values["worker"]),
            node_rank=int(values["node_rank"]),
            nodes=int(values["nodes"]),
            ranks_per_node=int(values["ranks_per_node"]),
            master_port=int(values["master_port"]),
        )
