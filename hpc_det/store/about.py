"""What an experiment's owner says of it after its submission; training does not depend on it.

    experiments/12/about.json   {"name", "description", "labels", "archived"}, as far as somebody has changed them

The command line is its one writer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hpc_det.node.json_files import Shape, checked, read_map, write_json
from hpc_det.store.folders import ExperimentFolder

_KINDS: Shape = {"name": str, "description": str, "labels": list[str], "archived": bool}


@dataclass(frozen=True, kw_only=True)
class About:
    name: str
    description: str
    labels: tuple[str, ...]
    archived: bool
    """Lists leave it out, until it goes on."""

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "labels": list(self.labels)}


def read_about(experiment: ExperimentFolder, config: Mapping[str, Any]) -> About:
    """As it was submitted, by `config`, and changed since."""
    changed = _changed(experiment)
    return About(
        name=changed.get("name", config["name"]),
        description=changed.get("description", config.get("description", "")),
        labels=tuple(changed.get("labels", config.get("labels", ()))),
        archived=changed.get("archived", False),
    )


def write_about(experiment: ExperimentFolder, **changes: Any) -> None:
    """Of an About's fields those that are now different."""
    write_json(experiment.about, {**_changed(experiment), **changes})


def _changed(experiment: ExperimentFolder) -> dict[str, Any]:
    changed = read_map(experiment.about) or {}
    return checked(changed, {key: kind for key, kind in _KINDS.items() if key in changed}, experiment.about)
