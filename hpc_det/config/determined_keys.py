"""Keys of Determined's experiment files that mean less here, or are spelled otherwise (its schemas/expconf/v0).

An experiment file says nothing that silently does not happen: a key is refused with what to do instead, or it is
accepted with a note.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, get_args

from hpc_det.config.fields import Unit
from hpc_det.config.merge import Tree

REMEDIES = {
    "batches_per_step": "use scheduling_unit",
    "checkpoint_storage.checkpoint_path": "use checkpoint_storage.storage_path",
    "checkpoint_storage.tensorboard_path": "leave it out: TensorBoard files lie in the trial's folder",
    "searcher.max_steps": "use max_length, such as {batches: 1000}",
    "searcher.train_stragglers": "leave it out: trials are stopped at the end of a rung",
}
"""Unknown keys, and what to do instead."""

_OWN_CLASS = "write a search method of your own (name: custom), as docs/search.md shows"
REMEDIES_OF_KINDS = {
    "searcher.name": {
        "adaptive": "use adaptive_asha",
        "adaptive_simple": "use adaptive_asha",
        "sync_halving": "use async_halving, or adaptive_asha",
        "pbt": _OWN_CLASS,
    }
}
"""Values of a key that Determined has or had, and what to do instead."""

_CONTAINER = "has no effect: the container tool of the cluster does as it is set up"
_PORTS = "has no effect: ranks have the ports of their node"
_MASTER = "has no effect: there is no master"

NO_EFFECT = {
    "project": "is only recorded: use labels to find an experiment",
    "workspace": "is only recorded: use labels to find an experiment",
    "debug": "has no effect: there is no agent of Determined's to log more",
    "records_per_epoch": "has no effect: an epoch is what the training loader holds",
    "resources.weight": "has no effect: shares belong to accounts and groups, and the site's administrators set them",
    "resources.native_parallel": "has no effect: the entrypoint says what is launched",
    "resources.agent_label": "has no effect: name a partition with resources.resource_pool",
    "environment.force_pull_image": _CONTAINER,
    "environment.registry_auth": _CONTAINER,
    "environment.add_capabilities": _CONTAINER,
    "environment.drop_capabilities": _CONTAINER,
    "environment.ports": _PORTS,
    "environment.proxy_ports": _PORTS,
    "environment.pod_spec": "has no effect on Slurm and PBS",
    "checkpoint_storage.propagation": "has no effect without a container",
    "optimizations.tensor_fusion_cycle_time": "has no effect: DDP sends a bucket when its last gradient is there",
    "preemption_timeout": "has no effect: the scheduler's grace time counts",
    "integrations": _MASTER,
    "security": _MASTER,
    "internal": _MASTER,
    "data_layer": "has no effect: read the data in the trial",
    "tensorboard_storage": "has no effect: TensorBoard files lie in the trial's folder",
}
"""Known keys that do nothing, and a word on it."""


def in_words(path: str) -> str:
    """What a description of the key adds: nothing, or that it has no effect."""
    return f" It {NO_EFFECT[path]}." if path in NO_EFFECT else ""


def notes(written: Iterable[str], scheduler: str) -> Iterator[str]:
    """A line for each key that somebody wrote and that has no effect; `written` has the paths of leaves."""
    paths = list(written)
    yield from (f"{key}: {why}" for key, why in NO_EFFECT.items() if any(_is_at_or_below(path, key) for path in paths))
    for section in ("slurm", "pbs"):
        keys = dict.fromkeys(path.partition("[")[0] for path in paths if path.startswith(f"{section}."))
        if section != scheduler:
            yield from (f"{key}: has no effect: the scheduler is {scheduler}" for key in keys)


def _is_at_or_below(path: str, key: str) -> bool:
    return path == key or path.startswith((f"{key}.", f"{key}["))


# --- spellings of older and newer versions of Determined, rewritten in each layer before the merge


def in_todays_names(tree: Tree) -> Tree:
    """The tree with `searcher.max_length` for time_metric and max_time (0.38), and with `cuda` for the device `gpu`.

    What is spelled both ways, or by halves, stays for the checks.
    """
    return {
        key: _searcher(value) if key == "searcher" else _environment(value) if key == "environment" else value
        for key, value in tree.items()
    }


def _searcher(section: Any) -> Any:
    if not isinstance(section, dict) or section.get("max_length") is not None:
        return section
    unit, amount = section.get("time_metric"), section.get("max_time")
    if unit not in get_args(Unit) or type(amount) is not int:
        return section
    others = {key: value for key, value in section.items() if key not in ("time_metric", "max_time")}
    return {**others, "max_length": {unit: amount}}


def _environment(section: Any) -> Any:
    if not isinstance(section, dict):
        return section
    return {
        key: _devices(value) if key in ("image", "environment_variables") else value for key, value in section.items()
    }


def _devices(value: Any) -> Any:
    if not isinstance(value, dict) or "gpu" not in value or "cuda" in value:
        return value
    return {"cuda" if device == "gpu" else device: item for device, item in value.items()}
