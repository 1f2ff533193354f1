"""`ray.tune.logger`: pretty_print."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from hpc_det.store.metrics import in_json


def pretty_print(result: Mapping[str, Any]) -> str:
    """Return a result as YAML, without its config and without values that are None."""
    left_out = ("config", "hist_stats")
    kept = {name: value for name, value in result.items() if value is not None and name not in left_out}
    return yaml.safe_dump(in_json(kept))
