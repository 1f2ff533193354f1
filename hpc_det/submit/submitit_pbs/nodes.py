"""The nodes of a job."""

from __future__ import annotations

from pathlib import Path


def nodes_of(nodefile: str) -> list[str]:
    """In order, once each: PBS_NODEFILE has a line for every task (mpiprocs)."""
    return list(dict.fromkeys(Path(nodefile).read_text().split()))
