"""How values are named in a trace: by the expression that leads to them, after what kind of state it is."""

from __future__ import annotations

ATTRIBUTE, GLOBAL = "attribute ", "global variable "
UNSAVED = (ATTRIBUTE, GLOBAL)
"""How the names of values begin that no checkpoint holds unless the trial sees to it."""
LOADER = "data loader."
"""In the names of what loads batches."""
GENERATOR = "generator at"
"""How the text of a random generator begins."""
WRAPPED_BY = {
    "module": "wrap_model",
    "optimizer": "wrap_optimizer",
    "scheduler": "wrap_lr_scheduler",
    "scaler": "wrap_scaler",
}
"""The method of a trial's context after which checkpoints hold an object of this kind."""


def unwrapped(kind: str) -> str:
    """In the names of values that are in such an object outside a checkpoint."""
    return f"(unwrapped {kind})"
