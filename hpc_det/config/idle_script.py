"""Finds scripts that define a trial class and never train it, by reading the code without importing it."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from contextlib import suppress
from pathlib import PurePath

from hpc_det.config.entrypoint import Context, named_trial, started_script, words_of
from hpc_det.config.python_code import modules_of, parsed, scope

_MAY_TRAIN = ("hpc_det", "determined", "importlib", "runpy", "absl", "fire")
"""Packages whose functions train, or call or load code that may."""
_DYNAMIC = ("exec", "eval", "__import__")


def idle_script_note(entrypoint: object, context: Context) -> str | None:
    """Return a note on a script that defines a trial class and trains nothing; None for any other entrypoint.

    Such a script calls, outside of its functions and classes, only builtins and functions of other packages, and passes
    no function or class to them.
    """
    with suppress(OSError, SyntaxError, ValueError):
        words = words_of(entrypoint)
        script = started_script(words)
        if named_trial(words) is not None or script is None or not script.endswith(".py"):
            return None
        tree = parsed(context.path(script))
        trials = [node.name for node in tree.body if isinstance(node, ast.ClassDef) and _is_trial(node)]
        if trials and _trains_nothing(tree, context):
            module = ".".join(PurePath(script).with_suffix("").parts)
            return (
                f"entrypoint: {script} defines the trial class {trials[0]} and trains nothing: it neither creates the "
                f"class nor calls a function of its own; to train the class, give {module}:{trials[0]} as the "
                f"entrypoint, or call hpc_det.pytorch.Trainer in the script"
            )
    return None


def _is_trial(node: ast.ClassDef) -> bool:
    names = (base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in node.bases)
    return any(name.endswith("Trial") for name in names)


def _trains_nothing(tree: ast.Module, context: Context) -> bool:
    nodes = list(scope(tree))
    harmless = {*dir(builtins), *_names_of_packages(nodes, context)} - {*_DYNAMIC}
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    own |= {node.asname or node.name for node in nodes if isinstance(node, ast.alias)} - harmless
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    return all(_root(call.func) in harmless and not _passes(call, own) for call in calls)


def _passes(call: ast.Call, names: set[str]) -> bool:
    """Return whether an argument of the call is, or contains, a lambda or one of these names."""
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    nodes = [node for argument in arguments for node in ast.walk(argument)]
    return any(isinstance(node, ast.Lambda) or getattr(node, "id", None) in names for node in nodes)


def _names_of_packages(nodes: list[ast.AST], context: Context) -> Iterator[str]:
    """Yield the names that imports of other packages bind, apart from those that may train."""
    for node in nodes:
        if not isinstance(node, ast.Import | ast.ImportFrom) or (isinstance(node, ast.ImportFrom) and node.level):
            continue
        packages = {module.partition(".")[0] for module in modules_of(node)[:1]}
        if packages & {*_MAY_TRAIN} or any(context.module_file(package) for package in packages):
            continue
        yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)


def _root(node: ast.expr) -> str:
    """Return the first name of a call such as `a.b().c()`."""
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
