"""List every leaf of the schemas, from their classes, each with the smallest experiment that may contain it."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, get_origin

from hpc_det.config.cluster import Cluster
from hpc_det.config.schema import Experiment
from hpc_det.config.section import Section, sections_in

CLUSTER = {"name": "lab", "slots_per_node": 2, "slot_type": "gpu"}
EXPERIMENT = {
    "name": "tiny",
    "entrypoint": ["python3", "train.py"],
    "searcher": {"name": "single", "metric": "accuracy", "max_length": {"batches": 10}},
}
_LENGTH = {"metric": "accuracy", "max_length": {"batches": 10}}
_KINDS: dict[str, dict[str, Any]] = {
    "Single": _LENGTH,
    "Random": {**_LENGTH, "name": "random", "max_trials": 2},
    "Grid": {**_LENGTH, "name": "grid"},
    "Points": {**_LENGTH, "name": "points", "points": [{"lr": 1}]},
    "AsyncHalving": {**_LENGTH, "name": "async_halving", "max_trials": 2, "num_rungs": 2},
    "AdaptiveAsha": {**_LENGTH, "name": "adaptive_asha", "max_trials": 2},
    "Optuna": {**_LENGTH, "name": "optuna", "max_trials": 2},
    "Custom": {**_LENGTH, "name": "custom", "max_trials": 2, "class": "train:Search"},
    "SharedFs": {"type": "shared_fs", "host_path": "/tmp"},
    "Directory": {"type": "directory", "container_path": "/tmp"},
    "S3": {"type": "s3", "bucket": "ours"},
    "Gcs": {"type": "gcs", "bucket": "ours"},
    "Azure": {"type": "azure", "container": "ours", "account_url": "https://ours.example.org"},
    "ContainerDevice": {"host_path": "/dev/null", "container_path": "/dev/null"},
    "ProxyPort": {"proxy_port": 80},
    "BindMount": {"host_path": "/tmp", "container_path": "/mnt"},
    "Hook": {"command": ["true"]},
    "LogPolicy": {"pattern": ".*"},
}
"""Keys that sections require beside a leaf."""
_BESIDE: dict[str, tuple[str, Any]] = {"webhook": ("command", None), "mail": ("command", None)}
"""For these keys, a key of the same section that must be absent."""


@dataclass(frozen=True)
class Leaf:
    """A key whose value is not a section."""

    schema: str
    """experiment or cluster."""
    path: tuple[str | int, ...]
    base: Any
    """The smallest tree that contains the section of the leaf."""

    @property
    def key(self) -> str:
        return str(self.path[-1])

    def __str__(self) -> str:
        kind = section.get("name", section.get("type")) if isinstance(section := self._section(), dict) else None
        return f"{self.schema}: {'.'.join(map(str, self.path))}{f' ({kind})' if kind else ''}"

    def _section(self) -> Any:
        found = self.base
        for part in self.path[:-1]:
            found = found[part]
        return found

    def given(self, value: Any) -> Any:
        """Return the tree with this value."""
        tree = deepcopy(self.base)
        section = tree
        for part in self.path[:-1]:
            section = section[part]
        section[self.key] = value
        if self.key in _BESIDE:
            section.pop(_BESIDE[self.key][0], None)
        return tree


def leaves() -> list[Leaf]:
    return [
        *(Leaf("experiment", path, base) for path, base in _below(Experiment, (), EXPERIMENT)),
        *(Leaf("cluster", path, base) for path, base in _below(Cluster, (), CLUSTER)),
    ]


def _below(model: type[Section], path: tuple[str | int, ...], base: Any) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    for name, field in model.model_fields.items():
        key = field.alias or name
        kinds = list(sections_in(field.annotation))
        if not kinds:
            yield (*path, key), base
        for kind in kinds:
            section, inner = dict(_KINDS.get(kind.__name__, {})), (*path, key)
            if _is(list, field.annotation):
                yield from _below(kind, (*inner, 0), _with(base, inner, [section]))
            elif _is(dict, field.annotation):
                yield from _below(kind, (*inner, "low"), _with(base, inner, {"low": section}))
            else:
                yield from _below(kind, inner, _with(base, inner, section))


def _is(container: type, annotation: Any) -> bool:
    return get_origin(annotation) is container


def _with(base: Any, path: tuple[str | int, ...], value: Any) -> Any:
    tree = deepcopy(base)
    section = tree
    for part in path[:-1]:
        section = section[part]
    section[path[-1]] = value
    return tree
