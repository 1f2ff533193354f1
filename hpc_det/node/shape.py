"""What a file of ours must hold: a disk may damage it, or a person edit it.

A kind of value is an annotation: a class, `list[str]`, `int | None`, a Literal, a dataclass or a Shape for a map with
these keys. `Moment` stands for seconds since the epoch, `Count` for how many things a process can hold.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from hpc_det.errors import HpcDetError, shown

Made = TypeVar("Made")
Shape = Mapping[str, Any]
"""The keys that a map must have, and the kinds of their values."""


class DamagedFile(HpcDetError, ValueError):
    """A file holds what hpc_det has not written."""


class Moment:
    """Seconds since the epoch."""


class Count:
    """How many things there are, all of them in memory."""


NUMBER = (int, float)
_LATEST = 1e11
"""Years that no clock shows; localtime(3) knows no later ones than some."""
_LONGEST, _LARGEST, _MOST = 2**63, 10**300, 10**7
"""A whole number fits into 64 bits, as arrays hold it; a metric may be larger, as long as it can be a float."""


def fits(value: Any, kind: Any) -> bool:
    """Whether `value`, as JSON holds it, is of this kind."""
    if isinstance(kind, dict):
        return isinstance(value, dict) and not problem_of(kind, value)
    if check := _PLAIN.get(kind):
        return check(value)
    if isinstance(kind, tuple):
        return any(fits(value, one) for one in kind)
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (UnionType, Union):
        return any(fits(value, one) for one in inner)
    if origin is Literal:
        return value in inner
    if origin in (list, tuple):
        return isinstance(value, list) and all(fits(item, inner[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(fits(item, inner[1]) for item in value.values())
    if is_dataclass(kind):
        return isinstance(value, dict) and not problem_of(_shape(kind), value)  # type: ignore[arg-type]
    return isinstance(value, kind)


def _is_whole(value: Any) -> bool:
    return type(value) is int and abs(value) < _LONGEST


def _is_number(value: Any) -> bool:
    return (type(value) is int and abs(value) < _LARGEST) or (isinstance(value, float) and abs(value) < float("inf"))


_PLAIN: Mapping[Any, Callable[[Any], bool]] = {
    Any: lambda value: True,
    str: lambda value: isinstance(value, str),
    dict: lambda value: isinstance(value, dict),
    int: _is_whole,
    NUMBER: _is_number,
    float: _is_number,
    Count: lambda value: type(value) is int and 0 <= value < _MOST,
    Moment: lambda value: _is_number(value) and 0 <= value < _LATEST,
    NoneType: lambda value: value is None,
}


def problem_of(shape: Shape, record: Mapping[str, Any]) -> str:
    """What is wrong with the map, or nothing."""
    for key, kind in shape.items():
        if key not in record:
            return f"it has no {key}"
        if not fits(record[key], kind):
            return f"{key} is {shown(record[key])}"
    return ""


def parsed(text: str | bytes, where: object) -> Any:
    """What the JSON `text` of a file says. Raises DamagedFile."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{where}: damaged: it is no JSON ({shown(str(error))})") from None


def insist_on(shape: Shape, record: Mapping[str, Any], where: object) -> None:
    """Raises DamagedFile for a line that its writer cannot have written. `where`: the file."""
    if problem := problem_of(shape, record):
        raise DamagedFile(
            f"{where}: damaged: {problem} in the line {shown(dict(record))}, which hpc_det has not written; remove "
            f"that line"
        )


def checked(data: Any, shape: Shape, where: object) -> dict[str, Any]:
    """The map as it is. Raises DamagedFile where it is none, or not of this shape. `where`: the file."""
    if not isinstance(data, dict):
        raise DamagedFile(f"{where}: damaged: {shown(data)} is no map")
    if problem := problem_of(shape, data):
        raise DamagedFile(f"{where}: damaged: {problem}")
    return data


def made(kind: type[Made], data: Any, where: object) -> Made:
    """The dataclass from the map that a file holds; other keys are of a newer version. Raises DamagedFile."""
    known = checked(data, _shape(kind), where)  # type: ignore[arg-type]
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]  # a dataclass
    more = {name: value for name, value in known.items() if name in names}
    hints = _hints(kind)  # type: ignore[arg-type]
    if problem := problem_of({name: hints[name] for name in more}, more):
        raise DamagedFile(f"{where}: damaged: {problem}")
    return kind(**more)


@cache
def _hints(kind: type) -> Shape:
    return get_type_hints(kind)


@cache
def _shape(kind: type) -> Shape:
    """The fields that have no default."""
    hints = _hints(kind)
    required = (field.name for field in fields(kind) if field.default is field.default_factory is MISSING)
    return {name: hints[name] for name in required}
