"""Problems of a configuration as sentences: path, what is wrong, who wrote it, the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from hpc_det.config.determineds_keys import REMEDIES
from hpc_det.config.fields import expectation, keys_at
from hpc_det.config.managed_flags import RefusedFlagsError
from hpc_det.config.merge import join

_SHOWN_CHARS = 80
MISSING = "required, but nobody set it"


class Problem(NamedTuple):
    path: str
    what: str
    remedy: str = ""


def render(problems: Iterable[Problem], source: Callable[[str], str | None]) -> list[str]:
    """One line for each problem; `source` names who wrote the value at a path, None for nobody."""
    return list(dict.fromkeys(_line(problem, source(problem.path)) for problem in problems))


def _line(problem: Problem, source: str | None) -> str:
    line = f"{problem.path}: {problem.what}"
    line += f" (from {source})" if source else ""
    line += f"; {problem.remedy}" if problem.remedy else ""
    return printable(line)


def printable(text: str) -> str:
    """A key or value may hold anything; a line of output may not."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def nearest(word: str, known: Iterable[str]) -> str:
    """The question whether a known word was meant, or nothing."""
    close = get_close_matches(word, list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else ""


def shown(value: Any) -> str:
    """The value as a message shows it."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 3]}..."


def schema_problems(model: type[BaseModel], error: ValidationError, prefix: str = "") -> Iterator[Problem]:
    """What pydantic found, with paths under `prefix`."""
    for details in error.errors(include_url=False):
        where = [part for part in details["loc"] if not str(part).startswith(("<", "["))]
        path = prefix
        for part in where:
            path = f"{path}[{part}]" if isinstance(part, int) else join(path, part)
        yield from _problems(model, details, tuple(str(part) for part in where), path)


def _problems(model: type[BaseModel], details: ErrorDetails, keys: tuple[str, ...], path: str) -> Iterator[Problem]:
    match details["type"]:
        case "extra_forbidden":
            yield unknown_key(path, keys[-1], keys_at(model, keys[:-1]) or [])
        case "invalid_key":
            return  # the check of texts names a key that is none
        case "missing":
            yield Problem(path, MISSING, f"give {expectation(model, keys)}")
        case _:
            error = details.get("ctx", {}).get("error")
            if isinstance(error, RefusedFlagsError):
                yield from (Problem(path, what, remedy) for what, remedy in error.refused)
            else:
                yield Problem(path, f"got {shown(details['input'])}", f"expected {expectation(model, keys)}")


def unknown_key(path: str, key: str, known: list[str]) -> Problem:
    """`key`, which stands at `path`, is none of `known`."""
    if path in REMEDIES:
        return Problem(path, "a key of Determined's that hpc_det does not have", REMEDIES[path])
    return Problem(path, f"unknown key {key!r}", nearest(key, known) or f"known: {', '.join(known)}")
