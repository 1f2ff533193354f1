"""What a schema of single values cannot say. The checks read plain trees, so they run beside a failed validation."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from typing import Any

from hpc_det.config.cluster import Cluster
from hpc_det.config.fields import time_limit_min
from hpc_det.config.merge import Tree, join
from hpc_det.config.problems import Problem, shown, unknown_key
from hpc_det.config.schema import Resources, constants

# Control characters, line separators, and surrogates, which no file can hold as UTF-8. A newline in submitit's job name
# runs as shell code.
_REFUSED_CATEGORIES = {"Cc", "Cs", "Zl", "Zp"}
FREE_FORM = ("data", "hyperparameters")


def text_problems(tree: Any, path: str = "") -> Iterator[Problem]:
    """Control characters in any key or value, and keys that are not texts."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            if not isinstance(key, str):
                yield Problem(join(path, key), f"the key {key!r} is not a text", "put it in quotes")
            else:
                yield from _control_characters(key, join(path, key), "")
            yield from text_problems(value, join(path, key))
    elif isinstance(tree, list):
        for i, value in enumerate(tree):
            yield from text_problems(value, f"{path}[{i}]")
    elif isinstance(tree, str):
        # Free-form values reach the trial as JSON, never a shell: a text of several lines or a tab is data there.
        yield from _control_characters(tree, path, "\n\t" if path.split(".")[0] in FREE_FORM else "")


def _control_characters(text: str, path: str, allowed: str) -> Iterator[Problem]:
    found = {char for char in text if unicodedata.category(char) in _REFUSED_CATEGORIES and char not in allowed}
    if found:
        names = ", ".join(f"U+{ord(char):04X}" for char in sorted(found))
        yield Problem(path, f"control character {names} in {shown(text)}", "remove it")


def hyperparameter_problems(hyperparameters: Any, path: str = "hyperparameters") -> Iterator[Problem]:
    """The single searcher takes constants: a scalar, a list, null, a nested map, or {type: const, val: ...}."""
    for name, value in hyperparameters.items() if isinstance(hyperparameters, dict) else ():
        here = join(path, name)
        if not isinstance(value, dict):
            continue
        if "type" not in value:
            yield from hyperparameter_problems(value, here)
        elif value["type"] != "const":
            yield Problem(
                f"{here}.type",
                f"{shown(value['type'])} is a range to search, and the single searcher needs constants",
                "give `type: const` and `val`",
            )
        else:
            if "val" not in value:
                yield Problem(f"{here}.val", "required, but nobody set it", "give the constant's value")
            yield from (
                unknown_key(join(here, key), key, ["type", "val"]) for key in value if key not in ("type", "val")
            )


def cross_problems(experiment: Tree, cluster: Tree) -> Iterator[Problem]:
    """Values that cannot go together. A value that is wrong by itself is left to the schema."""
    yield from _batch_size_problems(experiment)
    yield from _records_problems(experiment)
    yield from _time_limit_problems(experiment, cluster)


def _batch_size_problems(experiment: Tree) -> Iterator[Problem]:
    batch_size, path = _global_batch_size(experiment), "hyperparameters.global_batch_size"
    slots = _get(experiment, "resources", "slots_per_trial") or Resources().slots_per_trial
    if batch_size is None:
        return
    if type(batch_size) is not int or batch_size < 1:
        yield Problem(path, f"got {shown(batch_size)}", "expected a whole number >= 1")
    elif type(slots) is int and batch_size < slots:
        yield Problem(
            path,
            f"{batch_size} is below resources.slots_per_trial {slots}",
            f"every slot needs a record of each batch: use a batch of at least {slots}, or at most {batch_size} slots",
        )


def _records_problems(experiment: Tree) -> Iterator[Problem]:
    if _global_batch_size(experiment) is not None:
        return
    for path in ("searcher.max_length", "min_validation_period", "min_checkpoint_period"):
        records = _get(experiment, *path.split("."), "records")
        if records is not None:
            yield Problem(
                path,
                f"{{records: {records}}} cannot be counted in batches",
                "set hyperparameters.global_batch_size, or use batches or epochs",
            )


def _time_limit_problems(experiment: Tree, cluster: Tree) -> Iterator[Problem]:
    own = _get(experiment, "resources", "time_limit")
    limit, path = (
        (own, "resources.time_limit") if own is not None else (cluster.get("time_limit"), "cluster.time_limit")
    )
    lead_s = cluster.get("signal_lead_s") or Cluster.model_fields["signal_lead_s"].default
    try:
        minutes = time_limit_min(limit or "")
    except (ValueError, TypeError):
        return
    if type(lead_s) is int and minutes * 60 <= lead_s:
        yield Problem(
            path,
            f"{limit!r} is {minutes * 60} s and does not exceed cluster.signal_lead_s {lead_s}",
            f"give at least {lead_s // 60 + 1} minutes or a shorter signal_lead_s",
        )


def _global_batch_size(experiment: Tree) -> Any:
    hyperparameters = experiment.get("hyperparameters")
    return constants(hyperparameters).get("global_batch_size") if isinstance(hyperparameters, dict) else None


def _get(tree: Any, *keys: str) -> Any:
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree
