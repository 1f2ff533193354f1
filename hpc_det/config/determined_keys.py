"""Keys of Determined's experiment files that have no effect here or are spelled differently (its schemas/expconf/v0).

No key is ignored silently: it is refused with a remedy, or accepted with a note.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, get_args

from hpc_det.config.fields import Unit
from hpc_det.config.merge import Tree

REMEDIES = {
    "batches_per_step": "use scheduling_unit",
    "checkpoint_storage.checkpoint_path": "use checkpoint_storage.storage_path",
    "checkpoint_storage.tensorboard_path": "leave it out: TensorBoard files are written to the trial's folder",
    "searcher.max_steps": "use max_length, such as {batches: 1000}",
    "searcher.train_stragglers": "leave it out: trials are stopped at the end of a rung",
}
"""Remedies for keys that only Determined has, by path."""

_OWN_CLASS = "write a search method of your own (name: custom), as docs/how-to/search-hyperparameters.md shows"
REMEDIES_OF_KINDS = {
    "searcher.name": {
        "adaptive": "use adaptive_asha",
        "adaptive_simple": "use adaptive_asha",
        "sync_halving": "use async_halving, or adaptive_asha",
        "pbt": _OWN_CLASS,
    }
}
"""Remedies for values that only Determined has, by the path of the key and the value."""

_CONTAINER = "has no effect: the site's configuration of the container runtime applies"
_PORTS = "has no effect: ranks use the ports of their node"
_MASTER = "has no effect: hpc_det has no master"

NO_EFFECT = {
    "project": "is only recorded: use labels to find an experiment",
    "workspace": "is only recorded: use labels to find an experiment",
    "debug": "has no effect: hpc_det has no Determined agent",
    "records_per_epoch": "has no effect: an epoch is one pass over the training data loader",
    "resources.weight": "has no effect: the site's administrators set the shares of accounts and groups",
    "resources.native_parallel": "has no effect: the entrypoint determines how ranks are launched",
    "resources.agent_label": "has no effect: name a partition with resources.resource_pool",
    "environment.force_pull_image": _CONTAINER,
    "environment.registry_auth": _CONTAINER,
    "environment.add_capabilities": _CONTAINER,
    "environment.drop_capabilities": _CONTAINER,
    "environment.ports": _PORTS,
    "environment.proxy_ports": _PORTS,
    "environment.pod_spec": "has no effect on Slurm and PBS",
    "checkpoint_storage.propagation": "has no effect without a container",
    "optimizations.tensor_fusion_cycle_time": "has no effect: DDP sends a bucket once its last gradient is computed",
    "preemption_timeout": "has no effect: the scheduler's grace time applies",
    "integrations": _MASTER,
    "security": _MASTER,
    "internal": _MASTER,
    "data_layer": "has no effect: read the data in the trial",
    "tensorboard_storage": "has no effect: TensorBoard files are written to the trial's folder",
}
"""Accepted keys without an effect, by path, and the reason."""


def in_words(path: str) -> str:
    """Return the sentence to append to the description of a key without an effect; "" for any other key."""
    return f" It {NO_EFFECT[path]}." if path in NO_EFFECT else ""


def notes(written: Iterable[str], scheduler: str) -> Iterator[str]:
    """Yield a line for each key in `written` (paths of leaves) that has no effect with this scheduler."""
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
    """Return the tree with time_metric and max_time (0.38) as `searcher.max_length`, and the device `gpu` as `cuda`.

    A tree with both spellings, or with only one of the two keys, is left as it is; cross_checks reports it.
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
