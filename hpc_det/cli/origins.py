"""Every key of an effective configuration, with the layer that wrote it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from hpc_det.config.merge import Tree, leaves
from hpc_det.config.plain_yaml import load_yaml
from hpc_det.store.files import read_json
from hpc_det.store.folders import ExperimentFolder


def explained(tree: Tree, origins: Mapping[str, str]) -> Iterator[str]:
    """A line for each leaf of `tree`."""
    rows = [(f"{path}: {json.dumps(value, ensure_ascii=False)}", origins[path]) for path, value in leaves(tree)]
    width = max(len(setting) for setting, _ in rows)
    yield from (f"{setting.ljust(width)}  ({origin})" for setting, origin in rows)


def with_origins(experiment: ExperimentFolder) -> str:
    """Of an experiment, secrets masked."""
    return "\n".join(explained(load_yaml(experiment.config), read_json(experiment.origin) or {})) + "\n"
