"""Ranks that are forked from a process which has imported torch, so that a node imports it once and not once per rank.

A forked rank and an executed one train to the same bits. A forked rank shares the memory of the imported modules and
does not import them.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import io
import os
import re
import signal
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hpc_det.config.rank_variables import NO_FORKS, PRELOAD
from hpc_det.launch.launchers.arguments import RANK, is_trial
from hpc_det.node.forking import (
    Forked,
    end_like_a_script,
    import_all,
    prepare_to_compute,
    why_not_to_fork,
    write_through_to,
)

_COMPILER = "torch._dynamo"  # optimizers and DistributedDataParallel import it at their first step
_OF_TRIALS = (RANK, "hpc_det.pytorch.loop.harness", _COMPILER)
LATER = ("torch.utils.tensorboard", "torch.utils.serialization.config")
"""Modules that the rank of a trial imports at its first report and its first save."""
_OF_SCRIPTS = ("torch", _COMPILER)
_USES_TORCH = re.compile(
    r"^[ \t]*(?:from[ \t]+|import[ \t]+(?:[\w. \t]+,[ \t]*)*)"
    r"(?:torch|hpc_det|determined|lightning|pytorch_lightning|transformers|accelerate)\b",
    re.M,
)
# torch and its libraries read these variables at their import, so a script that sets one before its own `import torch`
# needs a Python in which torch is not imported yet.
_READ_AT_IMPORT = re.compile(
    r"""["'](?:OMP|GOMP|KMP|MKL|OPENBLAS|DNNL|ONEDNN|KINETO|PYTORCH|TORCHINDUCTOR|TORCHDYNAMO|TORCH(?!_NCCL))_[A-Z]"""
)


def modules_of(command: Sequence[str], code: Path, env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the modules that the ranks of this command share; none if each rank is to be executed.

    `command`: as in `Launch.command`; `code`: the folder in which it runs. Ranks are forked if they run a trial class,
    or a Python file that imports torch or a package that does. They are executed if that file, or one of the code
    folder that it imports, names variables that torch reads at its import.
    """
    preload = env.get(PRELOAD, "")
    if preload == NO_FORKS:
        return ()
    more = tuple(filter(None, preload.split(",")))
    if is_trial(command):
        texts = _texts(_files(command[2].partition(":")[0], [code]), code)
        return () if any(map(_READ_AT_IMPORT.search, texts)) else (*_OF_TRIALS, *more)
    script = code / command[0]
    if not command[0].endswith(".py") or not _USES_TORCH.search(_text(script)):
        return ()
    return () if any(map(_READ_AT_IMPORT.search, _texts([script], code))) else (*_OF_SCRIPTS, *more)


def _texts(first: Sequence[Path], code: Path) -> Iterator[str]:
    """Yield the text of each of these files, and of those in the code folder that they import, also indirectly."""
    files = list(first)
    for file in files:  # which grows meanwhile
        text = _text(file)
        yield text
        found = (path for name in _imports(text) for path in _files(name, [code, file.parent]))
        files += [path for path in dict.fromkeys(found) if path not in files]


def _imports(text: str) -> Iterator[str]:
    """Yield the names of the modules that a Python file imports; "a.b" also for `from a import b`."""
    import ast

    with suppress(SyntaxError, ValueError):  # the rank reports it
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from (".".join(filter(None, [node.module, alias.name])) for alias in node.names)


def _files(module: str, folders: Iterable[Path]) -> list[Path]:
    """Return the files in these folders that define the module and the packages in which it is."""
    parts = module.split(".")
    bases = [folder.joinpath(*parts[: number + 1]) for folder in folders for number in range(len(parts))]
    return [file for base in bases for file in (base.with_suffix(".py"), base / "__init__.py") if file.is_file()]


def _text(path: Path) -> str:
    """Return the text of a Python file; empty if it cannot be read, which the rank will report."""
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""


def imported(modules: Sequence[str]) -> bool:
    """Import these modules, and return whether ranks can be forked from this process now; if not, print why."""
    if not modules:
        return False
    try:
        import_all(modules)
        why = why_not_to_fork()
    except Exception as error:  # the ranks, which import the same, report it with its traceback
        why = f"{type(error).__name__}: {error}"
    if why:
        print(f"hpc-det: note: each rank imports torch separately: {why}", file=sys.stderr, flush=True)
    return why is None


def start(command: Sequence[str], variables: Mapping[str, str], log: int, prepare: Callable[[], None]) -> Forked:
    """Fork a rank that runs `command` with these additional variables, and return its process.

    `log`: descriptor of the file for its output. `prepare`: called first in the new process.
    """

    def run() -> int:
        prepare()
        write_through_to(log)
        os.environ.update(variables)
        prepare_to_compute()
        if not is_trial(command):
            code = run_file(command)
            end_like_a_script()
            return code
        from hpc_det.launch import rank  # imported already

        return rank.main(command[2])

    return Forked(run)


def run_file(command: Sequence[str]) -> int:
    """Run a Python file as the program of this process, as `python FILE ARGUMENTS...` does; return the exit code."""
    path = os.path.abspath(command[0])
    sys.argv = [*command]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    main = types.ModuleType("__main__")
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    main.__dict__.update(__file__=path, __builtins__=builtins, __loader__=loader, __cached__=None, __annotations__={})
    sys.modules["__main__"] = main
    code = 0
    try:
        with io.open_code(path) as file:
            program = compile(file.read(), path, "exec")
        exec(program, main.__dict__)
    except SystemExit as end:
        code = _code_of(end)
    except BaseException as error:
        trace = error.__traceback__ and error.__traceback__.tb_next  # without the line of this module
        # As Python does before it calls the hook; functions of `atexit` read them (hpc_det.node.program_end).
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return code


def _code_of(end: SystemExit) -> int:
    """Return the exit code of `sys.exit` (sys.exit, "The optional argument")."""
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    print(end.code, file=sys.stderr)
    return 1
