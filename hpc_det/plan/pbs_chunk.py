"""The resources of a PBS chunk that `resources.constraint` requests. Jobs load this module, which needs no pydantic."""

from __future__ import annotations

import re

_PART = re.compile(r"([A-Za-z][A-Za-z0-9_]*)(?:=([A-Za-z0-9_.-]+))?")


def pbs_resources(constraint: str) -> list[str]:
    """Return the resources of a chunk for a constraint such as `nvlink&cpu_type=milan`. Raises ValueError if it is not
    a list of names and of NAME=VALUE.
    """
    parts = [_PART.fullmatch(part) for part in constraint.split("&")]
    if not all(parts):
        raise ValueError(constraint)
    return list(dict.fromkeys(f"{part[1]}={part[2] or 'True'}" for part in parts if part))
