"""Checks of the global batch size against the number of slots.

`get_per_slot_batch_size()` divides it by the slots and rounds down, as Determined does, so a batch may contain fewer
records than configured. DeepSpeed refuses such a size.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from hpc_det.config.entrypoint import Context
from hpc_det.config.job_sections import Resources
from hpc_det.config.merge import Tree, value_at
from hpc_det.errors import Problem, count, shown

_PATH = "hyperparameters.global_batch_size"


def batch_size_problems(experiment: Tree) -> Iterator[Problem]:
    """Yield the problems of the global batch size; `experiment` may be invalid."""
    slots = value_at(experiment, "resources", "slots_per_trial") or Resources().slots_per_trial
    for batch_size in _sizes(value_at(experiment, *_PATH.split("."))):
        if type(batch_size) is not int or batch_size < 1:
            yield Problem(_PATH, f"got {shown(batch_size)}", "expected a whole number >= 1")
        elif type(slots) is int and batch_size < slots:
            yield Problem(
                _PATH,
                f"{batch_size} is below resources.slots_per_trial {slots}",
                f"every slot needs at least one record of each batch: use a batch size of at least {slots}, or at most "
                f"{count(batch_size, 'slot')}",
            )


def batch_notes(experiment: Tree, context: Context) -> Iterator[str]:
    """Yield a note for each batch size that the slots cannot share equally; one for a range, with an example.

    Also for the `train_batch_size` of the deepspeed config that the hyperparameters name.
    """
    slots = value_at(experiment, "resources", "slots_per_trial")
    spec = value_at(experiment, *_PATH.split("."))
    sizes = [*dict.fromkeys(size for size in _sizes(spec) if _leaves_rest(size, slots))]
    if isinstance(spec, dict) and spec.get("type") == "int":
        sizes = [size for size in _of_range(spec, experiment["searcher"]["name"]) if _leaves_rest(size, slots)][:1]
        what = "its range has sizes that are"
    else:
        what = "it is"
    for size in sizes:
        each, multiples = size // slots, _multiples(size, slots)
        yield (
            f"{_PATH}: {what} not a multiple of resources.slots_per_trial {slots}: of {size}, trials that use "
            f"get_per_slot_batch_size() train on {count(each, 'record')} on each slot, {each * slots} in all; use "
            f"{multiples}"
        )
    found = _deepspeed_sizes(value_at(experiment, "hyperparameters"), context)
    for path, size in dict.fromkeys((path, size) for path, size in found if _leaves_rest(size, slots)):
        yield (
            f"{path}: {size} is not a multiple of resources.slots_per_trial {slots}, so DeepSpeed refuses it "
            f"unless several slots share one model (pipeline or tensor parallelism); use {_multiples(size, slots)}"
        )


def _leaves_rest(size: Any, slots: Any) -> bool:
    return type(size) is int and type(slots) is int and size > slots and size % slots != 0


def _multiples(size: int, slots: int) -> str:
    """Return the two nearest sizes that the slots can share."""
    return f"{size - size % slots} or {size - size % slots + slots}"


def _of_range(spec: Tree, searcher: str) -> list[int]:
    """Return the sizes that a searcher may choose from a valid range: those of a grid, else all of them."""
    low, high, count = spec["minval"], spec["maxval"], spec.get("count")
    if searcher == "grid" and count and count > 1:
        return [round(low + (high - low) * place / (count - 1)) for place in range(min(count, high - low + 1))]
    return [*range(low, min(high, low + 2) + 1)]  # of three numbers in a row, at most one is a multiple of the slots


def _sizes(spec: Any) -> list[Any]:
    """Return the batch sizes that a trial may get; of a range only the smallest.

    space_problems reports a map that is not a valid hyperparameter.
    """
    match spec:
        case None:
            return []
        case {"type": "const", "val": size} | {"type": "int", "minval": int(size)}:
            return [size]
        case {"type": "categorical", "vals": [*sizes]}:
            return sizes
        case {"type": "double" | "log"}:
            return [spec]
        case dict():
            return []
    return [spec]


def _deepspeed_sizes(hyperparameters: Any, context: Context) -> Iterator[tuple[str, Any]]:
    """Yield the `train_batch_size` that overwrites that of the deepspeed config, or the file's, with its path."""
    overwrites = value_at(hyperparameters, "overwrite_deepspeed_args")
    if value_at(overwrites, "train_batch_size") is not None:
        for size in _sizes(overwrites["train_batch_size"]):
            yield "hyperparameters.overwrite_deepspeed_args.train_batch_size", size
        return
    for name in _sizes(value_at(hyperparameters, "deepspeed_config")):
        with suppress(OSError, ValueError, TypeError):  # the context reports a file that it cannot read
            content = json.loads(context.path(name).read_text(encoding="utf-8"))
            yield f"hyperparameters.deepspeed_config: {name}: train_batch_size", value_at(content, "train_batch_size")
