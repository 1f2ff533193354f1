"""What an experiment's owner says of it after its submission; training does not depend on it.

    experiments/12/about.json   {"name", "description", "labels", "archived"}, as far as somebody has changed them

The command line is its one writer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hpc_det.store.files import read_json, write_json
from hpc_det.store.folders import ExperimentFolder


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
    changed = read_json(experiment.about) or {}
    return About(
        name=changed.get("name", config["name"]),
        description=changed.get("description", config.get("description", "")),
        labels=tuple(changed.get("labels", config.get("labels", ()))),
        archived=changed.get("archived", False),
    )


def write_about(experiment: ExperimentFolder, **changes: Any) -> None:
    """Of an About's fields those that are now different."""
    write_json(experiment.about, {**(read_json(experiment.about) or {}), **changes})
