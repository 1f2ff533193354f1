"""What a gang's container is: image, mounts, devices. How each runtime takes them: container_command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hpc_det.node.json_files import made


@dataclass(frozen=True, kw_only=True)
class Mount:
    source: str
    """On the host, absolute."""
    target: str
    """In the container, absolute."""
    read_only: bool
    propagation: str
    """As mount(8) names it: rprivate, rshared, ..."""


@dataclass(frozen=True, kw_only=True)
class Device:
    source: str
    target: str
    mode: str
    """Of the letters r (read), w (write) and m (make the node)."""


@dataclass(frozen=True, kw_only=True)
class Container:
    """One per node: the ranks of a node share it."""

    runtime: str
    """apptainer, podman or pyxis."""
    image: str
    """A path, an address with ://, or an image's name as Docker writes it."""
    mounts: tuple[Mount, ...]
    devices: tuple[Device, ...]
    shm_size: int | None
    """Bytes of /dev/shm; None: as the host has it."""
    args: tuple[str, ...]
    """The site's own flags for the runtime."""

    @property
    def starts_entrypoint(self) -> bool:
        """Whether the node agent starts it, for the entrypoint; srun starts the whole agent in it otherwise."""
        return self.runtime != "pyxis"

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Container:
        """Raises DamagedFile."""
        found = made(cls, data, "container")
        return replace(
            found,
            mounts=tuple(made(Mount, mount, "container") for mount in data["mounts"]),
            devices=tuple(made(Device, device, "container") for device in data["devices"]),
            args=tuple(found.args),
        )
