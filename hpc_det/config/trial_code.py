"""Checks of the trial that an entrypoint names, and of its metrics, by reading the code without importing it."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from hpc_det.config.entrypoint import (
    TRIAL,
    Context,
    command_problems,
    dotted_trial,
    missing,
    named_trial,
    started_script,
    trial_of,
    words_of,
)
from hpc_det.config.python_code import (
    bound_names,
    classes_of,
    global_names,
    is_dynamic,
    may_bind,
    modules_of,
    packages_of,
    parsed,
    scope,
)
from hpc_det.errors import nearest, or_else, shown, some

_REQUIRED = ("train_batch", "build_training_data_loader", "build_validation_data_loader")
_EVALUATE = ("evaluate_batch", "evaluate_full_dataset")
_LOADING = ("importlib.", "runpy.")
_REPORTING = ("hpc_det.", "determined.", *_LOADING)
"""Packages that report a trial's metrics, or load code that may."""
_TRAINING = ("hpc_det.pytorch.", "determined.pytorch.", *_LOADING)
"""Packages with the training loop, or that load code that may have it."""
_LOOPS = (*_TRAINING, "hpc_det.core.", "hpc_det.integrations.")
"""Packages whose loops can be stopped and compared batch by batch, or that load code that may have one."""
_ROOTS = ("PyTorchTrial", "DeepSpeedTrial")
_VARIABLE = re.compile(r"\bDET_[A-Z]")
"""A variable that Determined sets for ranks (hpc_det.launch.determined_variables)."""


def check_entrypoint(entrypoint: object, context: Context) -> list[str]:
    """Return the problems of the trial that `entrypoint` names, with `--trial module:Class` or as `module:Class` alone.

    Code that can be judged only by running it, such as a computed class or a base class from elsewhere, is accepted; so
    is a module that is not in the code directory (see `entrypoint_notes`).
    """
    try:
        words = words_of(entrypoint)
        trial = trial_of(words)
    except ValueError as error:
        return [f"entrypoint: {error}"]
    if problems := [*command_problems(words, context)]:
        return problems
    if meant := dotted_trial(words, context):
        return [f"entrypoint: {words[0]} is not a command; name a trial by module and class, as {meant}"]
    if trial is None:
        return []
    module, class_name = trial
    file = context.module_file(module)
    if file is None or not _is_the_imported(module, context):
        return []
    try:
        tree = parsed(file)
    except SyntaxError as error:
        line = f": {shown(error.text.strip())}" if error.text else ""
        return [
            f"entrypoint: {file}:{error.lineno or 1}: syntax error: {error.msg}{line}; correct this line or the one "
            "above"
        ]
    except OSError as error:
        return [f"entrypoint: {file}: cannot be read: {error}"]
    return _class_problems(tree, class_name, file)


def entrypoint_notes(entrypoint: object, context: Context, python_path: Sequence[str] = ()) -> list[str]:
    """Return a note if this process can find neither the module of the trial nor the script, or an empty list.

    They may exist only where the job runs: inside the container, or after the profile's `setup` or a startup hook.
    `python_path`: the entries of PYTHONPATH in the job.
    """
    with suppress(ValueError):
        words = words_of(entrypoint)
        where = "it has to exist where the job runs"
        if trial := trial_of(words):
            return [f"{line}; {where}" for line in _unresolved(trial[0], context, python_path)]
        started = started_script(words)
        if started and started.endswith(".py") and not context.path(started).exists():
            return [f"entrypoint: {started} does not exist here; {where}"]
    return []


def _unresolved(module: str, context: Context, python_path: Sequence[str]) -> Iterator[str]:
    if context.module_file(module) or context.is_compiled(module) or _is_importable(module):
        return
    folders = [str(context.path(entry)) for entry in python_path if "$" not in entry]
    if PathFinder.find_spec(module.split(".")[0], folders):
        return
    close = context.namesakes(module)
    holders = some([each.partition(".")[0] for each in close], 3)
    meant = f"; did you mean the module {some(close, 3)}, or the context directory {holders}?" if close else ""
    yield missing("module", module, f"{module.split('.')[0]}.py", context) + meant


def silent_script(entrypoint: object, context: Context) -> str | None:
    """Return the Python script of the entrypoint if it reports no metric, else None.

    It reports none if neither the script nor a module that it imports from the context directory imports hpc_det. None
    also for a trial class, and where only running the code would show it, as for a shell script.
    """
    return _script_without(_REPORTING, entrypoint, context)


def script_without_trainer(entrypoint: object, context: Context) -> str | None:
    """Return the script if it has no `Trainer`: it and its imports never import hpc_det.pytorch."""
    return _script_without(_TRAINING, entrypoint, context)


def script_without_loop(entrypoint: object, context: Context) -> str | None:
    """Return the script if it has neither a `Trainer` nor a loop on hpc_det.core."""
    return _script_without(_LOOPS, entrypoint, context)


def _script_without(packages: tuple[str, ...], entrypoint: object, context: Context) -> str | None:
    with suppress(OSError, SyntaxError, ValueError):
        words = words_of(entrypoint)
        script = started_script(words)
        if named_trial(words) is None and script and script.endswith(".py"):
            return None if _reaches(packages, context.path(script), context, seen=set()) else script
    return None


def _reaches(packages: tuple[str, ...], file: Path, context: Context, seen: set[Path]) -> bool:
    """Return whether importing this file imports one of the packages, or may do so."""
    seen.add(file)
    tree = parsed(file)
    modules = {module for node in ast.walk(tree) for module in modules_of(node)}
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    if used & {"__import__", "exec", "eval"} or any(f"{module}.".startswith(packages) for module in modules):
        return True
    places = (context, Context(file.parent))
    files = {found for module in modules for place in places if (found := place.module_file(module))} - seen
    return any(_reaches(packages, found, context, seen) for found in sorted(files))


def speaks_determined(entrypoint: object, context: Context) -> bool:
    """Return whether the code was written for Determined.

    That is so if the entrypoint names a launcher of Determined or is only `module:Class`, if the trial's file or the
    script imports `determined`, or if the entrypoint or one of these files names a variable DET_*.
    """
    with suppress(OSError, SyntaxError, ValueError):
        words = words_of(entrypoint)
        if len(words) == 1 and TRIAL.fullmatch(words[0]):
            return True
        if any("determined.launch." in word or _VARIABLE.search(word) for word in words):
            return True
        return any(
            _reads_variables(file) or "determined" in packages_of(parsed(file)) for file in _own_files(words, context)
        )
    return False


def _reads_variables(file: Path) -> bool:
    return bool(_VARIABLE.search(file.read_text(encoding="utf-8", errors="replace")))


def trial_class(entrypoint: object, context: Context) -> tuple[str, ast.ClassDef] | None:
    """Return the source of the file that defines the trial, and the class; None if running the code may change it.

    Raises ValueError, OSError and SyntaxError if it cannot be read.
    """
    trial = trial_of(words_of(entrypoint))
    file = context.module_file(trial[0]) if trial else None
    if trial is None or file is None:
        return None
    tree = parsed(file)
    found = classes_of(tree).get(trial[1], [])
    if len(found) != 1 or found[0].decorator_list or is_dynamic(tree):
        return None
    return file.read_text(encoding="utf-8"), found[0]


def _own_files(words: list[str], context: Context) -> Iterator[Path]:
    if (trial := trial_of(words)) and (file := context.module_file(trial[0])):
        yield file
    scripts = (context.path(word) for word in words if word.endswith(".py"))
    yield from (script for script in scripts if script.is_file())


def _is_importable(module: str) -> bool:
    """Return whether this Python finds the module, without importing its packages."""
    name, *below = module.split(".")
    spec = _found(name)
    for part in below:
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, spec.submodule_search_locations) if spec else None
    return spec is not None


def _found(package: str) -> ModuleSpec | None:
    # Unlike PathFinder, this asks the finders of editable installs, too.
    with suppress(ValueError, ImportError):
        return importlib.util.find_spec(package)
    return None


def _is_the_imported(module: str, context: Context) -> bool:
    """Return whether Python certainly imports the module's .py file in the code directory.

    It prefers an extension module to that file, and an installed package to a folder without an `__init__.py`; and a
    package may change where its modules are looked up.
    """
    if context.is_compiled(module):
        return False
    top, *_ = parts = module.split(".")
    for i in range(1, len(parts)):
        file = context.path(f"{'/'.join(parts[:i])}/__init__.py")
        if not file.is_file():
            found = _found(top)
            return found is None or found.origin is None or Path(found.origin).parent == context.path(top)
        with suppress(OSError):
            if any(word in file.read_bytes() for word in (b"__path__", b"sys.modules")):
                return False
    return True


def _class_problems(tree: ast.Module, class_name: str, file: Path) -> list[str]:
    names = set(bound_names(tree)) | global_names(tree)
    class_name, _, inner = class_name.partition(".")
    if class_name not in names:
        classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
        hidden = names & {"*", "__getattr__"} or may_bind(tree)
        known = or_else(nearest(class_name, classes), f"it defines {', '.join(classes) or 'no class'}")
        return [] if hidden else [f"entrypoint: {file} does not define {class_name!r}; {known}"]
    if inner:
        return []
    if not _may_be_trial(class_name, tree):
        return [
            f"entrypoint: {class_name} in {file} is not a trial; derive the class from hpc_det.pytorch.PyTorchTrial or "
            f"hpc_det.pytorch.deepspeed.DeepSpeedTrial"
        ]
    methods = None if is_dynamic(tree) else _methods(class_name, classes_of(tree))
    if methods is None:
        return []
    lacking = [name for name in _REQUIRED if name not in methods]
    evaluates = [name for name in _EVALUATE if name in methods]
    where = f"entrypoint: {class_name} in {file}"
    problems = [f"{where} lacks {', '.join(lacking)}; a trial needs them"] if lacking else []
    if not evaluates:
        problems.append(f"{where} defines neither {' nor '.join(_EVALUATE)}; define one of them")
    elif len(evaluates) > 1:
        problems.append(f"{where} defines both {' and '.join(_EVALUATE)}; keep one of them")
    return problems


def _may_be_trial(name: str, tree: ast.Module) -> bool:
    """Return False if the only definition of the name is a function, or a class without a base class."""
    bound = [*bound_names(tree)]
    if is_dynamic(tree) or "*" in bound or bound.count(name) != 1 or name in global_names(tree):
        return True
    for node in scope(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return bool(node.decorator_list)
        if isinstance(node, ast.ClassDef) and node.name == name:
            return bool(node.bases or node.keywords or node.decorator_list)
    return True


def _methods(name: str, classes: dict[str, list[ast.ClassDef]]) -> set[str] | None:
    """Return the methods of a trial of this file, its own and those of base classes in this file; None if unknown."""
    if len(classes.get(name, [])) != 1:
        return None
    (node,) = classes[name]
    if node.decorator_list or node.keywords or not node.bases:
        return None
    others = {known: nodes for known, nodes in classes.items() if known != name}
    methods = set(bound_names(node))
    for base in node.bases:
        last = base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
        inherited = _methods(last, others) if last in classes else set() if last in _ROOTS else None
        if inherited is None:
            return None
        methods |= inherited
    return methods


# --- the metrics that the trial returns

_ADDS = ("wrap_reducer", "on_validation_end")
"""Names whose use may add metrics to the returned ones."""


def metric_notes(entrypoint: object, context: Context, metric: str) -> list[str]:
    """Return a note if the trial does not return `metric`, or an empty list.

    Otherwise the user would learn this only at the first validation, which by default comes after all training.
    """
    with suppress(OSError, SyntaxError, ValueError):
        if found := trial_class(entrypoint, context):
            source, node = found
            names = None if any(word in source for word in _ADDS) else _returned(node)
            if names is not None and metric not in names:
                known = f"searcher.metric: {metric!r} is not among the metrics {sorted(names)} that {node.name} returns"
                return [f"{known}; {nearest(metric, names) or 'name one of those'}"]
    return []


def _returned(trial: ast.ClassDef) -> set[str] | None:
    """Return the names of the validation metrics; None if only running the code shows them."""
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
    """Yield the return statements of a function, without those of inner functions."""
    pending: list[ast.AST] = list(function.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Return):
            yield node
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            pending.extend(ast.iter_child_nodes(node))
