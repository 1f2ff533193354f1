"""Reading Python code without importing it: what a module imports, and which names it binds."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from pathlib import Path

_BINDING = {"setattr", "globals", "locals", "vars", "exec"}
"""Functions with which names may be bound."""


def parsed(file: Path) -> ast.Module:
    """Return the code of a file. Raises OSError and SyntaxError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as one for an invalid escape sequence in a string of the user's code
        try:
            return ast.parse(file.read_bytes(), filename=str(file))
        except (MemoryError, RecursionError):
            raise SyntaxError("nested too deeply for Python's parser") from None
        except ValueError as error:  # for a null byte, in Python 3.11.2; 3.11.7 raises SyntaxError
            raise SyntaxError(str(error)) from None


def scope(body: ast.Module | ast.ClassDef) -> Iterator[ast.AST]:
    """Yield the nodes of this scope, including those under if, try and with, without those of inner scopes."""
    pending: list[ast.AST] = list(body.body)
    while pending:
        node = pending.pop(0)
        yield node
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            pending.extend(ast.iter_child_nodes(node))


def modules_of(node: ast.AST) -> list[str]:
    """Return the modules that this statement imports, including names that may be attributes of modules."""
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=module, names=names):
            base = module or ""
            return [base, *(f"{base}.{alias.name}".lstrip(".") for alias in names)]
    return []


def packages_of(tree: ast.Module) -> set[str]:
    """Return the packages that this module's top level imports."""
    modules: set[str] = set()
    for node in scope(tree):
        match node:
            case ast.Import(names=names):
                modules |= {alias.name for alias in names}
            case ast.ImportFrom(module=str(module), level=0):
                modules.add(module)
    return {module.partition(".")[0] for module in modules}


def bound_names(body: ast.Module | ast.ClassDef) -> Iterator[str]:
    """Yield the names that statements of this scope bind."""
    for node in scope(body):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.alias(name=name, asname=asname):
                yield asname or name
            case ast.Name(id=name, ctx=ast.Store()) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name


def is_dynamic(tree: ast.Module) -> bool:
    """Return whether names or methods may come from calls or assignments that only running the code shows."""
    used = {node.id for node in scope(tree) if isinstance(node, ast.Name)}
    patched = {
        getattr(node.value, "id", "")
        for node in scope(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    return bool(used & _BINDING or patched & set(classes_of(tree)))


def may_bind(tree: ast.Module) -> bool:
    """Return whether the module, or a function that it may call, may bind names that no statement shows."""
    nodes = [*ast.walk(tree)]
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return bool(names & _BINDING or attributes & {"modules", "f_globals", "__dict__", "__setattr__"})


def global_names(tree: ast.Module) -> set[str]:
    """Return the names that functions bind in the module."""
    return {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}


def classes_of(tree: ast.Module) -> dict[str, list[ast.ClassDef]]:
    """Return the classes that the module defines at its top level, by name."""
    classes: dict[str, list[ast.ClassDef]] = {}
    for node in scope(tree):
        if isinstance(node, ast.ClassDef):
            classes.setdefault(node.name, []).append(node)
    return classes
