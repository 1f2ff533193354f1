"""Does a trial resume exactly? Two short trainings of it, one of them stopped several times, compared bit by bit.

The ranks of both write what they had before each batch (`hpc_det.pytorch.state.resume_trace`);
`hpc_det.view.resume_check` finds the first difference and its probable cause.
"""

from __future__ import annotations

VARIABLE = "HPC_DET_RESUME_CHECK"
"""In the environment of the ranks of such a training: the batches after which it is stopped, such as `7,19`."""
NONE = "none"
"""The value of `VARIABLE` for a training without stops."""


def stops_of(variable: str | None) -> frozenset[int] | None:
    """The stops in the value of `VARIABLE`; None in an ordinary training."""
    if not variable:
        return None
    return frozenset() if variable == NONE else frozenset(map(int, variable.split(",")))


def as_variable(stops: tuple[int, ...]) -> str:
    return ",".join(map(str, stops)) or NONE
