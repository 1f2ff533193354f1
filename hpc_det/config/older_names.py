"""Other spellings of older and newer versions of Determined, rewritten in each layer before the merge."""

from __future__ import annotations

from typing import Any, get_args

from hpc_det.config.fields import Unit
from hpc_det.config.merge import Tree


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
