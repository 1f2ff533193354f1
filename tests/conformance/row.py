"""What all rows of the suite have in common."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Row:
    """One behaviour of an upstream system."""

    case: str
    """What is tried, as a sentence without a verb at its end: `a searcher without a metric`."""
    follows: str
    """The file of the upstream repository that states or tests the behaviour."""
    differs: str = ""
    """What hpc_det does instead, and why; empty where it does the same."""
