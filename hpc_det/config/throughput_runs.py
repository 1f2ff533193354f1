"""What limits the throughput of a training: short runs of it, each with one thing otherwise, and what they show."""

from __future__ import annotations

from typing import Literal, TypeAlias, cast

VARIABLE = "HPC_DET_THROUGHPUT"
"""In the environment of the ranks of such a run: what they train on."""
TrainsOn: TypeAlias = Literal["data", "first batch"]
NO_WHOLE_BATCH = "an epoch has not one whole batch"
"""What a rank says where a batch is larger than the data set."""


def trains_on(variable: str | None) -> TrainsOn | None:
    """Of the value of `VARIABLE`; None in an ordinary training."""
    return cast(TrainsOn, variable) if variable else None
