"""Environment variables that change the behaviour of an experiment's ranks.

HPC_DET_COMPAT         `import determined`, `import ray` or both import hpc_det's own classes (hpc_det.compat)
HPC_DET_THROUGHPUT     in a short run that shows what limits the throughput: the input to train on
HPC_DET_PRELOAD        the modules that the direct launcher imports, in addition to its own, before it forks the ranks
HPC_DET_RESUME_CHECK   in a short run that shows whether a trial resumes exactly: the batches after which it stops
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias, cast

from hpc_det.errors import UsageError
from hpc_det.resources import COMPAT_PATHS

COMPAT = "HPC_DET_COMPAT"
DETERMINED, RAY = "determined", "ray"
"""The packages that `COMPAT` may name, separated by commas."""

PRELOAD = "HPC_DET_PRELOAD"
"""The variable with module names, separated by commas, or `NO_FORKS`. Set by the agent from `launch`."""
NO_FORKS = "-"
"""The value with which each rank is executed (hpc_det.launch.forked_ranks)."""

THROUGHPUT = "HPC_DET_THROUGHPUT"
TrainsOn: TypeAlias = Literal["data", "first batch"]
"""The values of `THROUGHPUT`."""
NO_WHOLE_BATCH = "an epoch has not one whole batch"
"""The error of a rank whose batch is larger than the data set."""

RESUME_CHECK = "HPC_DET_RESUME_CHECK"
"""The variable with batch numbers such as `7,19`, or `NO_STOPS`.

The ranks record their state before each batch (hpc_det.pytorch.state.resume_trace, hpc_det.core.resume_trace), and
hpc_det.view.resume_check finds the first difference between a run with stops and one without.
"""
NO_STOPS = "none"


def compat_packages(env: Mapping[str, str]) -> list[str]:
    """Return the packages that HPC_DET_COMPAT names; none if it is empty or unset.

    Raises UsageError for names other than "determined" and "ray".
    """
    value = env.get(COMPAT, "")
    names = [name.strip() for name in value.split(",")] if value else []
    if not set(names) <= set(COMPAT_PATHS):
        raise UsageError(
            f"{COMPAT}: got {value!r}; expected {DETERMINED!r}, {RAY!r}, '{DETERMINED},{RAY}' or an empty value"
        )
    return names


def with_compat(env: Mapping[str, str], packages: Iterable[str]) -> dict[str, str]:
    """Return `env` with a PYTHONPATH by which every Python started with it imports hpc_det as these packages."""
    folders = [str(COMPAT_PATHS[name]) for name in packages]
    if not folders:
        return dict(env)
    return {**env, "PYTHONPATH": os.pathsep.join(filter(None, [*folders, env.get("PYTHONPATH")]))}


def trains_on(value: str | None) -> TrainsOn | None:
    """Return the input that the value of `THROUGHPUT` names; None in an ordinary training."""
    return cast(TrainsOn, value) if value else None


def stops_of(value: str | None) -> frozenset[int] | None:
    """Return the batch numbers in the value of `RESUME_CHECK`; None in an ordinary training."""
    if not value:
        return None
    return frozenset() if value == NO_STOPS else frozenset(map(int, value.split(",")))


def stops_as_value(stops: tuple[int, ...]) -> str:
    """Return the value of `RESUME_CHECK` for these batch numbers."""

    return ",".join(map(str, stops)) or NO_STOPS
