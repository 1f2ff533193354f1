"""Generate docs/reference/environment-variables.md from hpc_det.config.environment_variables."""

from __future__ import annotations

from hpc_det.config.environment_variables import GROUPS

HEAD = """# Environment variables

The environment variables that hpc_det reads, and those that it sets for the processes that it starts. hpc_det also
reads variables of the scheduler (`SLURM_*`, `PBS_*`), with the meaning that the scheduler's manual gives.
"""


def made() -> str:
    """Return the whole page."""
    return "\n".join([HEAD, *(_table(heading, group) for heading, group in GROUPS.items())])


def _table(heading: str, group: dict[str, str]) -> str:
    rows = [f"| `{name}` | {meaning} |" for name, meaning in group.items()]
    return "\n".join([f"## {heading}", "", "| Variable | Meaning |", "| --- | --- |", *rows]) + "\n"
