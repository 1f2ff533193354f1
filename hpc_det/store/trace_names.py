"""The names of values in a resume trace: a prefix for the kind of state, and the expression that leads to the value."""

from __future__ import annotations

ATTRIBUTE, GLOBAL, VARIABLE = "attribute ", "global variable ", "variable "
UNSAVED = (ATTRIBUTE, GLOBAL, VARIABLE)
"""Prefixes of the names of values that are in no checkpoint, unless the trial saves them.

VARIABLE: local variables of the functions of a script that are running.
"""
LOADER = "data loader."
"""Part of the names of values that belong to a data loader."""
GENERATOR = "generator at"
"""Beginning of the text that represents a random generator."""
WRAPPED_BY = {
    "module": "wrap_model",
    "optimizer": "wrap_optimizer",
    "scheduler": "wrap_lr_scheduler",
    "scaler": "wrap_scaler",
}
"""Kind of object -> method of a trial's context that adds an object of this kind to checkpoints."""


def unwrapped(kind: str) -> str:
    """Return the text in the names of values of an object that was not wrapped, so is not in checkpoints."""
    return f"(unwrapped {kind})"
