"""`ray.tune.callback`. No callback is called, and `run` logs a line that says so."""

from __future__ import annotations


class Callback:
    """The base class of callbacks."""
