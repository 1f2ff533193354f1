"""Every key of an effective configuration, with the layer that wrote it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from hpc_det.config.merge import Tree, leaves


def explained(tree: Tree, origins: Mapping[str, str]) -> Iterator[str]:
    """A line for each leaf of `tree`."""
    rows = [(f"{path}: {json.dumps(value, ensure_ascii=False)}", origins[path]) for path, value in leaves(tree)]
    width = max(len(setting) for setting, _ in rows)
    yield from (f"{setting.ljust(width)}  ({origin})" for setting, origin in rows)
