"""`ray.tune.callback`, and the callbacks of Ray's own examples. None is called, and `run` logs a line that says so."""

from __future__ import annotations

from typing import Any


class Callback:
    """The base class of callbacks."""


class FailureInjectorCallback(Callback):
    """Ends nodes of a Ray cluster at random, in Ray. Here the user can kill ranks or jobs instead.

    Args:
        **options: The arguments of Ray's class.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options


class ProgressCallback(Callback):
    """Writes the states of trials to a file, in Ray. Here the run folder of the search contains them."""
