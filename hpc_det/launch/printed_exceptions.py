"""Finds Python's tracebacks in the output of programs, and whether the program has caught the exception.

`traceback.print_exc()` prints like the interpreter does at the end of a program. The outermost frame shows the
difference: that of a caught exception is the code that catches it, inside a `try`.
"""

from __future__ import annotations

import ast
import builtins
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

_PREFIX = r"(?P<prefix>\[[\w=,: ]+\](?:<\w+>)?:? ?|\d+: )?"
"""The rank before each line of a rank's output: [rank1]: of PyTorch, [default1]: of torchrun, [1,0]<stderr>: of
mpirun, 1: of srun."""
_FRAME = re.compile(_PREFIX + r'  File "(?P<file>[^"]*)"(?:, line (?P<at>\d+))?')
_NAMED = re.compile(r"(?P<name>[A-Za-z_][\w.]*)(?::|$)")
"""The line of a traceback that names the exception."""

_ENDS = ("exit", "_exit", "quit", "abort")
"""Functions of sys, os and builtins that end a program."""
_TRY = (ast.Try, getattr(ast, "TryStar", ast.Try))  # except* is new in Python 3.11


class PrintedException(NamedTuple):
    """A traceback in the output of a program."""

    prefix: str
    line: str
    """The line that names the exception."""
    file: str
    at: int
    """Line number in `file` of the outermost frame."""
    end: int
    """Index of the next line of the output."""

    def was_caught(self) -> bool | None:
        """Return whether the program has caught the exception and continued; None if its code cannot be read."""
        if self.file == "<frozen runpy>":  # of the interpreter itself, for `python3 -m`
            return False
        try:
            blocks = _try_blocks(self.file, os.stat(self.file).st_mtime_ns)
        except SyntaxError:  # code that cannot be parsed has caught nothing
            return False
        except (OSError, ValueError, MemoryError, RecursionError):
            return None
        handlers = [
            handler
            for node in blocks
            if node.body[0].lineno <= self.at <= (node.body[-1].end_lineno or 0)
            for handler in node.handlers
        ]
        return any(_catches(handler, self.line) for handler in handlers)


def printed_exceptions(printed: str) -> Iterator[PrintedException]:
    """Yield the tracebacks in the output, in order."""
    first: re.Match[str] | None = None
    """The outermost frame of the traceback that is being read; None outside of one."""
    for place, line in enumerate(printed.split("\n")):
        prefix = (first["prefix"] or "") if first else ""
        if (frame := _FRAME.match(line)) and (first is None or (frame["prefix"] or "") != prefix):
            first = frame
        elif first and not frame and line.startswith(prefix):
            text = line.removeprefix(prefix)
            if text and not text[0].isspace():
                if _NAMED.match(text):
                    yield PrintedException(prefix, text.strip(), first["file"], int(first["at"] or 0), place + 1)
                first = None


@lru_cache(maxsize=8)
def _try_blocks(file: str, changed: int) -> list[ast.Try]:
    """Return the `try` statements of a file. `changed`: its time of change, for the cache."""
    tree = ast.parse(Path(file).read_bytes())
    return [node for node in ast.walk(tree) if isinstance(node, _TRY)]


def _catches(handler: ast.ExceptHandler, line: str) -> bool:
    """Return whether the handler catches the exception of this line, and neither raises one nor ends the program."""
    nodes = [*ast.walk(handler)]
    if any(isinstance(node, ast.Raise) or getattr(node, "attr", getattr(node, "id", "")) in _ENDS for node in nodes):
        return False
    found = _NAMED.match(line)
    name = found["name"].rpartition(".")[2] if found else ""
    kind = getattr(builtins, name, Exception)
    ancestors = {name, *(each.__name__ for each in (kind.__mro__ if isinstance(kind, type) else ()))}
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(each is None or ast.unparse(each).rpartition(".")[2] in ancestors for each in caught)
