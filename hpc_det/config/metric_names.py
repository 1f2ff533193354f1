"""Is searcher.metric among the metrics that the trial returns? Answered by reading the code, where that is enough."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import suppress

from hpc_det.config.context import Context
from hpc_det.config.entrypoint import trial_class
from hpc_det.errors import nearest

_EVALUATE = ("evaluate_batch", "evaluate_full_dataset")
_ADDS = ("wrap_reducer", "on_validation_end")
"""Where these are in the code, other metrics may come to those that are returned."""


def metric_notes(entrypoint: object, context: Context, metric: str) -> list[str]:
    """A note where it is not. The first validation of the trial would find it out, after all training by default."""
    with suppress(OSError, SyntaxError, ValueError):
        if found := trial_class(entrypoint, context):
            source, node = found
            names = None if any(word in source for word in _ADDS) else _returned(node)
            if names is not None and metric not in names:
                known = f"searcher.metric: {metric!r} is not among the metrics {sorted(names)} that {node.name} returns"
                return [f"{known}; {nearest(metric, names) or 'name one of those'}"]
    return []


def _returned(trial: ast.ClassDef) -> set[str] | None:
    """The names of the validation metrics; None if that takes running the code."""
    methods = [node for node in trial.body if isinstance(node, ast.FunctionDef) and node.name in _EVALUATE]
    if len(methods) != 1 or methods[0].decorator_list:
        return None
    names: set[str] = set()
    for returned in _returns(methods[0]):
        if not isinstance(returned.value, ast.Dict):
            return None
        for key in returned.value.keys:
            if not (isinstance(key, ast.Constant) and isinstance(key.value, str)):
                return None
            names.add(key.value)
    return names or None


def _returns(function: ast.FunctionDef) -> Iterator[ast.Return]:
    """Its own, without those of functions inside it."""
    pending: list[ast.AST] = list(function.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Return):
            yield node
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            pending.extend(ast.iter_child_nodes(node))
