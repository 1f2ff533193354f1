"""The environment variable with which an experiment asks for `import determined` (hpc_det.compat)."""

from __future__ import annotations

from collections.abc import Mapping

from hpc_det.errors import UsageError

VARIABLE = "HPC_DET_COMPAT"
DETERMINED = "determined"


def is_on(env: Mapping[str, str]) -> bool:
    """Return whether HPC_DET_COMPAT asks for it; empty does not. Raises UsageError for any other value."""
    value = env.get(VARIABLE, "")
    if value not in ("", DETERMINED):
        raise UsageError(f"{VARIABLE}: got {value!r}; expected {DETERMINED!r}, or nothing")
    return bool(value)
