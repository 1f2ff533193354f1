"""Ids: `12.server` and `12[3].server` in PBS, `12` and `12_3` in submitit, which splits at "_"."""

from __future__ import annotations

import re

_PBS = re.compile(r"([0-9]+)(?:\[([0-9]*)\])?(?:\.\S+)?")


def from_pbs(pbs_id: str) -> str:
    """`12[3].server` -> `12_3`, and `12[].server` -> `12`. Raises ValueError for anything else, such as a bare name."""
    found = _PBS.fullmatch(pbs_id.strip())
    if not found:
        raise ValueError(f"{pbs_id!r} is no job id of PBS, such as 12.server or 12[3].server")
    return f"{found[1]}_{found[2]}" if found[2] else found[1]


def to_pbs(job_id: str) -> str:
    """Without the server, which PBS' commands add."""
    number, _, index = job_id.partition("_")
    return f"{number}[{index}]" if index else number


def array_of(job_id: str) -> str | None:
    """`12_3` -> `12[]`; None for a job of its own."""
    number, _, index = job_id.partition("_")
    return f"{number}[]" if index else None
