"""`ray.tune.utils.mock`: the callback of an example that loses nodes."""

from __future__ import annotations

from typing import Any

from hpc_det.compat.ray_tune.callback import Callback


class FailureInjectorCallback(Callback):
    """Ends nodes of a Ray cluster at random, in Ray. Here the user can kill ranks or jobs instead.

    Args:
        **options: The arguments of Ray's class.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
