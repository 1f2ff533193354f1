"""How a trial's `evaluate_batch` is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

Evaluate = Callable[..., Any]


def numbered(evaluate: Evaluate) -> Evaluate:
    """`evaluate_batch` as a function of (batch, number), whether its signature takes the number or not.

    It does with a parameter `batch_idx`, or a second one that must be given.
    """
    parameters = inspect.signature(evaluate).parameters
    if "batch_idx" in parameters:
        return lambda batch, number: evaluate(batch, batch_idx=number)
    needed = [each for each in parameters.values() if each.default is each.empty]
    if len([each for each in needed if each.kind is each.POSITIONAL_OR_KEYWORD]) > 1:
        return evaluate
    if any(each.kind is each.VAR_POSITIONAL for each in needed):
        return evaluate
    return lambda batch, number: evaluate(batch)
