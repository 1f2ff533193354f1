"""Keys of Determined's experiment files that have no effect here or are spelled differently (its schemas/expconf/v0).

No key is ignored silently: it is refused with a remedy, or accepted with a note.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, get_args

from hpc_det.config.fields import Unit
from hpc_det.config.merge import Tree, value_at
from hpc_det.config.schema import Experiment
from hpc_det.config.section import field_at, sections_at

REMEDIES = {
    "batches_per_step": "use scheduling_unit",
    "checkpoint_storage.checkpoint_path": "use checkpoint_storage.storage_path",
    "checkpoint_storage.tensorboard_path": "leave it out: TensorBoard files are written to the trial's folder",
    "resources.slots": "use slots_per_trial",
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
    "optimizations.grad_updates_size_file": "has no effect: profiling measures the exchange of gradients",
    "optimizations.tensor_fusion_cycle_time": "has no effect: DDP sends a bucket once its last gradient is computed",
    "preemption_timeout": "has no effect: the scheduler's grace time applies",
    "integrations": _MASTER,
    "security": _MASTER,
    "internal": _MASTER,
    "data_layer": "has no effect: read the data in the trial",
    "tensorboard_storage": "has no effect: TensorBoard files are written to the trial's folder",
}
"""Accepted keys without an effect, by path, and the reason."""
_OF_SHARED_FS = {
    "checkpoint_storage.container_path": "has no effect with type shared_fs: a container sees the folder at host_path"
}
_OTHER_DEFAULTS: dict[str, list[Any]] = {
    "project": ["Uncategorized"],
    "workspace": ["Uncategorized"],
    "resources.agent_label": [""],
    "optimizations.tensor_fusion_cycle_time": [5],
}
"""Defaults of some version of Determined that are not also those of the schema, for keys without an effect."""


def in_words(path: str) -> str:
    """Return the sentence to append to the description of a key without an effect; "" for any other key."""
    return f" It {NO_EFFECT[path]}." if path in NO_EFFECT else ""


def without_effect(tree: Tree) -> dict[str, str]:
    """Return the reason for each key that has no effect in this tree, whether the tree has the key or not."""
    is_shared_fs = value_at(tree, "checkpoint_storage", "type") == "shared_fs"
    return {**NO_EFFECT, **(_OF_SHARED_FS if is_shared_fs else {})}


def is_default(key: str, value: Any) -> bool:
    """Return whether the value of a key without an effect is a default of Determined."""
    *above, name = key.split(".")
    fields = [field for section in sections_at(Experiment, above) if (field := field_at(section, name))]
    defaults: list[Any] = [field.get_default(call_default_factory=True) for field in fields if not field.is_required()]
    return value is None or any(value == known for known in defaults + _OTHER_DEFAULTS.get(key, []))


def is_default_image(image: str) -> bool:
    """Return whether a container image is the default of some version of Determined."""
    return re.match(r"determinedai/(environments|pytorch-ngc)(-dev)?:", image) is not None


def notes(tree: Tree, written: Iterable[str], scheduler: str) -> Iterator[str]:
    """Yield a line for each key in `written` (paths of leaves of `tree`) that has no effect with this scheduler.

    One line names all keys with a default of Determined: stored configurations contain every key.
    """
    paths = list(written)
    found = {key: why for key, why in without_effect(tree).items() if any(_is_at_or_below(path, key) for path in paths)}
    defaults = [key for key in found if is_default(key, value_at(tree, *key.split(".")))]
    yield from (f"{key}: {why}" for key, why in found.items() if key not in defaults)
    if defaults:
        yield f"{', '.join(defaults)}: no effect here, and left at Determined's default"
    for section in ("slurm", "pbs"):
        keys = dict.fromkeys(path.partition("[")[0] for path in paths if path.startswith(f"{section}."))
        if section != scheduler:
            yield from (f"{key}: has no effect: the scheduler is {scheduler}" for key in keys)


def _is_at_or_below(path: str, key: str) -> bool:
    return path == key or path.startswith((f"{key}.", f"{key}["))


# --- spellings of older and newer versions of Determined, rewritten in each layer before the merge


def in_todays_names(tree: Tree) -> Tree:
    """Return the tree with time_metric and max_time (0.38) as `searcher.max_length`, the device `gpu` as `cuda`, and
    without values that mean unset in Determined: an empty `resources.resource_pool`, and null at a key of its own.

    A tree with both spellings, or with only one of the two keys, is left as it is; cross_checks reports it.
    """
    tree = {key: _REWRITTEN[key](value) if key in _REWRITTEN else value for key, value in tree.items()}
    return _without_nulls(tree)


def _without_nulls(tree: Tree) -> Tree:
    """Return the tree without nulls at keys that only Determined has, which its stored configurations contain."""
    for path in REMEDIES:
        section, _, key = path.rpartition(".")
        found = tree.get(section) if section else tree
        if isinstance(found, dict) and key in found and found[key] is None:
            rest = {name: value for name, value in found.items() if name != key}
            tree = {**tree, section: rest} if section else rest
    return tree


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


def _resources(section: Any) -> Any:
    if not isinstance(section, dict) or section.get("resource_pool") != "":
        return section
    return {**section, "resource_pool": None}


def _devices(value: Any) -> Any:
    if not isinstance(value, dict) or "gpu" not in value or "cuda" in value:
        return value
    return {"cuda" if device == "gpu" else device: item for device, item in value.items()}


_REWRITTEN = {"searcher": _searcher, "environment": _environment, "resources": _resources}
"""The function that rewrites each section."""
