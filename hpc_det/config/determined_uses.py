"""Uses of names of `determined` that hpc_det lacks, found in the code of an experiment without running it."""

from __future__ import annotations

import ast
import importlib.util
import re
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hpc_det.config.determined_names import missing_part
from hpc_det.config.entrypoint import Context, started_script, trial_of, words_of

_ROOT = "determined"
_REMEDIES = {
    "determined.keras": "port the model to PyTorch",
    "determined.estimator": "port the model to PyTorch",
    "determined.pytorch.LightningAdapter": "see docs/how-to/lightning.md",
    "determined.pytorch.lightning": "see docs/how-to/lightning.md",
    "determined.pytorch.dsat": "search over the settings, as docs/how-to/search-hyperparameters.md shows",
    "determined.searcher": "write a search method of your own, as docs/how-to/search-hyperparameters.md shows",
    "determined.common": "use hpc_det.client, see docs/how-to/python-client.md",
    "determined.cli": "use hpc_det.client, see docs/how-to/python-client.md",
}
_ALTERNATIVES = "docs/how-to/port-from-determined.md lists what hpc_det has instead"
_CONDITIONAL = (
    *(ast.Try, getattr(ast, "TryStar", ast.Try), ast.With, ast.AsyncWith),
    *(ast.If, ast.IfExp, ast.BoolOp, ast.For, ast.AsyncFor, ast.While),
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.AnnAssign),
)
"""Statements and expressions whose parts an import of the module may leave out."""
_FOR_CHECKERS = re.compile(r"(\w+\.)?TYPE_CHECKING")
MOST_FILES = 500
"""Number of files that are read at most."""


@dataclass
class Uses:
    """Uses of names that hpc_det lacks, as lines for the user."""

    problems: list[str] = field(default_factory=list)
    """Uses that fail when the entrypoint's module is imported."""
    notes: list[str] = field(default_factory=list)
    """Uses in functions, under conditions or in a `try`, and in files that may not be imported."""


def missing_uses(entrypoint: object, context: Context, *, is_enabled: bool) -> Uses:
    """Return the uses of `determined` in the code that the entrypoint reaches.

    `is_enabled`: whether `import determined` imports hpc_det in the ranks. If not, there is one note, about the first
    module that certainly imports `determined`.
    """
    if context.module_file(_ROOT) is not None:  # the user has a package of that name
        return Uses()
    reached = _reached(entrypoint, context)
    if not is_enabled:
        return Uses(notes=[*_real_imports([file for file in reached if reached[file]])][:1])
    uses = Uses()
    for file, is_certain in reached.items():
        for name, (line, is_conditional) in sorted(_missing_in(file).items(), key=lambda item: item[1]):
            remedy = next((_REMEDIES[part] for part in _REMEDIES if f"{name}.".startswith(f"{part}.")), _ALTERNATIVES)
            text = f"entrypoint: {file}:{line}: {name}: hpc_det has no counterpart; {remedy}"
            (uses.problems if is_certain and not is_conditional else uses.notes).append(text)
    return uses


def _real_imports(files: list[Path]) -> Iterator[str]:
    """Yield a note for each file that imports Determined's own package, unless that is installed here."""
    with suppress(ValueError):
        if importlib.util.find_spec(_ROOT):
            return
    for file in files:
        lines = [line for _name, line, is_conditional in _uses_of(file) if not is_conditional]
        if lines:
            yield (
                f"entrypoint: {file}:{min(lines)}: imports Determined's own package, since HPC_DET_COMPAT is not set; "
                f"to import hpc_det instead, set environment.environment_variables: [HPC_DET_COMPAT=determined]"
            )


# --- the files that the entrypoint reaches


def _reached(entrypoint: object, context: Context) -> dict[Path, bool]:
    """Return the files of the context directory that run, and whether each is certainly imported.

    If the entrypoint is a command that only a shell understands, these are the files at the top of the directory.
    """
    starts, roots = _starts(entrypoint, context)
    pending = [(file, True) for file in starts]
    if not starts:
        return {context.path(name): False for name in context.python_files()}
    reached: dict[Path, bool] = {}
    while pending and len(reached) < MOST_FILES:
        file, is_certain = pending.pop()
        if file not in reached or (is_certain and not reached[file]):
            reached[file] = is_certain
            for found, is_conditional in _imports(file, roots):
                pending.append((found, is_certain and not is_conditional))
    return reached


def _starts(entrypoint: object, context: Context) -> tuple[list[Path], list[Context]]:
    """Return the files with which the entrypoint begins, and the folders in which modules are looked up."""
    with suppress(ValueError):
        words = words_of(entrypoint)
        if trial := trial_of(words):
            return _files_of(trial[0], context), [context]
        script = started_script(words)
        if script and script.endswith(".py") and context.path(script).is_file():
            return [context.path(script)], [Context(context.path(script).parent), context]
    return [], []


def _imports(file: Path, roots: list[Context]) -> Iterator[tuple[Path, bool]]:
    """Yield the files of the context directory that a file imports, and whether it may leave the import out."""
    for node, is_conditional in _nodes(file):
        if isinstance(node, ast.Import):
            modules, places = [alias.name for alias in node.names], roots
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            modules = [base, *(f"{base}.{alias.name}".lstrip(".") for alias in node.names)]
            above = file.parents[node.level - 1 : node.level]  # empty for more dots than there are folders
            places = [Context(folder) for folder in above] if node.level else roots
        else:
            continue
        for module in filter(None, modules):
            found = next(filter(None, (_files_of(module, place) for place in places)), [])
            yield from ((each, is_conditional) for each in found)


def _files_of(module: str, context: Context) -> list[Path]:
    """Return the file of the module, after those of its packages; an empty list if the module is elsewhere."""
    if context.module_file(module) is None:
        return []
    parts = module.split(".")
    files = (context.module_file(".".join(parts[: i + 1])) for i in range(len(parts)))
    return [file for file in files if file]


# --- the uses in a file


def _missing_in(file: Path) -> dict[str, tuple[int, bool]]:
    """Return the missing names, with the line of the first use and whether the module may leave all uses out."""
    found: dict[str, tuple[int, bool]] = {}
    for name, line, is_conditional in _uses_of(file):
        if missing := missing_part(name):
            first, others = found.get(missing, (line, True))
            found[missing] = min(first, line), others and is_conditional
    return found


def _uses_of(file: Path) -> Iterator[tuple[str, int, bool]]:
    """Yield the names of Determined that a file uses, the line, and whether an import of the file may leave it out."""
    nodes = [*_nodes(file)]
    aliases = _aliases([node for node, _ in nodes])
    own = {_dotted(node) for node, _ in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    for node, is_conditional in nodes:
        match node:
            case ast.Import(names=names):
                used = [alias.name for alias in names if _is_determined(alias.name)]
            case ast.ImportFrom(module=str(module), names=names, level=0) if _is_determined(module):
                used = [module if alias.name == "*" else f"{module}.{alias.name}" for alias in names]
            case ast.Attribute(ctx=ast.Load()) if _dotted(node) not in own:
                root, _, attributes = _dotted(node).partition(".")
                used = [f"{aliases[root]}.{attributes}"] if root in aliases else []
            case _:
                continue
        yield from ((name, node.lineno, is_conditional) for name in used)


def _dotted(node: ast.expr) -> str:
    """Return the text of `a.b.c`; "" for an attribute of any other expression."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else ""


def _aliases(nodes: list[ast.AST]) -> dict[str, str]:
    """Return the modules of Determined by the names to which imports bind them, without names with other meanings."""
    aliases: dict[str, str] = {}
    others: set[str] = set()
    for node in nodes:
        match node:
            case ast.Import(names=names):
                tops = [each.name.partition(".")[0] for each in names]
                bindings = [(e.asname, e.name) if e.asname else (top, top) for e, top in zip(names, tops, strict=True)]
            case ast.ImportFrom(module=module, names=names, level=0):
                bindings = [(each.asname or each.name, f"{module}.{each.name}") for each in names]
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.ClassDef(name=name):
                bindings = [(name, "")]
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                bindings = [(name, "")]
            case _:
                continue
        for name, module in bindings:
            if _is_determined(module) and aliases.get(name, module) == module:
                aliases[name] = module
            else:
                others.add(name)
    return {name: module for name, module in aliases.items() if name not in others}


def _is_determined(module: str) -> bool:
    return f"{module}.".startswith(f"{_ROOT}.")


def _nodes(file: Path) -> Iterator[tuple[ast.AST, bool]]:
    """Yield the nodes of a file, and whether an import of the file may leave them out; none if it cannot be read.

    Nodes below `if TYPE_CHECKING` never run, and are left out.
    """
    pending: list[tuple[ast.AST, bool]] = []
    with suppress(OSError, SyntaxError, ValueError, MemoryError, RecursionError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as one for an invalid escape sequence in a string
        pending.append((ast.parse(file.read_bytes()), False))
    while pending:
        node, is_conditional = pending.pop()
        yield node, is_conditional
        is_conditional = is_conditional or isinstance(node, _CONDITIONAL)
        is_for_checkers = isinstance(node, ast.If) and _FOR_CHECKERS.fullmatch(ast.unparse(node.test))
        children = node.orelse if is_for_checkers and isinstance(node, ast.If) else ast.iter_child_nodes(node)
        pending += [(child, is_conditional) for child in children]
