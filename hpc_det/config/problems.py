"""The rendering of a configuration's problems as lines: path, what is wrong, the layer that wrote it, the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from hpc_det.config.determined_keys import REMEDIES, REMEDIES_OF_KINDS
from hpc_det.config.managed_flags import RefusedFlagsError
from hpc_det.config.merge import join
from hpc_det.config.secrets import shown_at
from hpc_det.config.section import Section, Where, expectation, is_tag, keys_at, sections_at
from hpc_det.errors import MISSING, Problem, nearest, printable, shown


def render(
    problems: Iterable[Problem], source: Callable[[str], str | None], place: Callable[[str], str] = str
) -> list[str]:
    """Return one line for each problem, without duplicates.

    `source` returns the name of the layer that wrote the value at a path, or None if it is not known. `place` returns
    the path as the layer has it: a list of the merged tree may begin with elements of other layers.
    """
    lines = (_line(problem._replace(path=place(problem.path)), source(problem.path)) for problem in problems)
    return list(dict.fromkeys(lines))


def _line(problem: Problem, source: str | None) -> str:
    line = f"{problem.path}: {problem.what}"
    line += f" (from {source})" if source else ""
    line += f"; {problem.remedy}" if problem.remedy else ""
    return printable(line)


def schema_problems(model: type[Section], error: ValidationError, prefix: str = "") -> Iterator[Problem]:
    """Yield the problems in pydantic's `error`, with paths below `prefix`."""
    for details in error.errors(include_url=False):
        where = [*details["loc"][:-1], *(part for part in details["loc"][-1:] if part != "[key]")]
        path = prefix
        for part in where:
            if not is_tag(part):
                path = f"{path}[{part}]" if isinstance(part, int) else join(path, part)
        yield from _problems(model, details, where, path)


def _problems(model: type[Section], details: ErrorDetails, where: Where, path: str) -> Iterator[Problem]:
    match details["type"]:
        case "extra_forbidden":
            yield _unexpected_key(model, path, where)
        case "invalid_key":
            return  # text_problems reports a key that is not a string
        case "missing":
            yield Problem(path, MISSING, f"give {expectation(model, where)}")
        case "union_tag_invalid":
            yield _unknown_kind(path, details["input"], sections_at(model, where))
        case _:
            error = details.get("ctx", {}).get("error")
            if isinstance(error, RefusedFlagsError):
                yield from (Problem(path, what, remedy) for what, remedy in error.refused)
            else:
                yield Problem(path, f"got {shown_at(path, details['input'])}", f"expected {expectation(model, where)}")


def _unexpected_key(model: type[Section], path: str, where: Where) -> Problem:
    """Return the problem of an unknown key, with the kind of this section or the other section that has such a key."""
    key = str(where[-1])
    (section,) = sections_at(model, where[:-1])
    owners = [name for name, kind in section.kinds.items() if key in kind.known_keys()]
    if not owners:
        problem, home = unknown_key(path, key, section.known_keys()), _home(model, key)
        return problem._replace(remedy=home) if home and path not in REMEDIES else problem
    own = next(name for name, kind in section.kinds.items() if kind is section)
    switch = join(path.rpartition(".")[0], section.kind_key)
    what = f"{own!r} has no such key" if own else f"this key needs {switch}"
    return Problem(path, what, f"leave it out, or set {switch} to {' or '.join(owners)}")


def _home(model: type[Section], key: str) -> str:
    """Return a question whether the key of the same name elsewhere was meant; "" if none or several exist."""
    if key in model.known_keys():
        return f"did you mean {key!r} at the top of the file?"
    homes = [f"{name}.{key}" for name in model.known_keys() if key in (keys_at(model, (name,)) or [])]
    return f"did you mean {homes[0]!r}?" if len(homes) == 1 else ""


def _unknown_kind(path: str, value: Any, kinds: list[type[Section]]) -> Problem:
    kind_key, known = kinds[0].kind_key, [name for name in kinds[0].kinds if name]
    kind, where = value[kind_key], join(path, kind_key)
    remedies = REMEDIES_OF_KINDS.get(where, {})
    if isinstance(kind, str) and kind in remedies:
        return Problem(where, f"Determined's {kind!r} does not exist in hpc_det", remedies[kind])
    hint = nearest(kind, known) if isinstance(kind, str) else ""
    expected = f"expected one of {', '.join(known)}"
    return Problem(where, f"got {shown(kind)}", f"{hint} {expected}" if hint else expected)


def unknown_key(path: str, key: str, known: list[str]) -> Problem:
    """Return the problem that the `key` at `path` is not one of `known`."""
    if path in REMEDIES:
        return Problem(path, "hpc_det does not have this key of Determined", REMEDIES[path])
    return Problem(path, f"unknown key {key!r}", nearest(key, known) or f"known: {', '.join(known)}")
