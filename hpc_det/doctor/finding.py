"""One thing that was looked at."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

Verdict: TypeAlias = Literal["ok", "note", "problem"]


class Finding(NamedTuple):
    subject: str
    verdict: Verdict
    told: str
    """What was found."""
    remedy: str = ""
    """What to do; empty only where all is well."""
