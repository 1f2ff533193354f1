"""Checks that the schema does not make: control characters, large numbers, and the space of hyperparameters.

They read plain trees, which may be invalid, so that their problems are reported together with those of the schema.
"""

from __future__ import annotations

import math
import sys
import unicodedata
from collections.abc import Iterator
from typing import Any, NamedTuple

from hpc_det.config.merge import Tree, join
from hpc_det.config.secrets import shown_at
from hpc_det.errors import MISSING, Problem, count, nearest, shown

# Control characters, line separators, and surrogates, which cannot be encoded as UTF-8. Control characters are a
# security risk: a newline in submitit's job name would run as shell code.
_REFUSED_CATEGORIES = {"Cc", "Cs", "Zl", "Zp"}
_LARGEST = 2**63
"""The bound of integers, which schedulers and the JSON readers of other languages cannot exceed."""
FREE_FORM = ("data", "hyperparameters")
"""The sections whose keys and values belong to the trial."""


def text_problems(tree: Any, path: str = "") -> Iterator[Problem]:
    """Yield a problem for each control character in a key or value, key that is not a string, and too large number."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            if not isinstance(key, str):
                yield Problem(join(path, key), f"the key {key!r} is not a string", "put it in quotes")
            else:
                yield from _control_characters(key, join(path, key), "")
            yield from text_problems(value, join(path, key))
    elif isinstance(tree, list):
        for i, value in enumerate(tree):
            yield from text_problems(value, f"{path}[{i}]")
    elif type(tree) is int and abs(tree) >= _LARGEST and path.split(".")[0] not in FREE_FORM:
        yield Problem(path, f"{shown(tree)} has more than 63 bits", "give a smaller number")
    elif isinstance(tree, str):
        # Free-form values reach the trial as JSON and never a shell, so newlines and tabs in them are harmless.
        yield from _control_characters(tree, path, "\n\t" if path.split(".")[0] in FREE_FORM else "")


def _control_characters(text: str, path: str, allowed: str) -> Iterator[Problem]:
    found = {char for char in text if unicodedata.category(char) in _REFUSED_CATEGORIES and char not in allowed}
    if found:
        names = ", ".join(f"U+{ord(char):04X}" for char in sorted(found))
        yield Problem(path, f"control character {names} in {shown_at(path, text)}", "remove it")


def searcher_name(tree: Tree) -> str | None:
    """Return the name of the searcher in a tree that is not validated yet, or None."""
    searcher = tree.get("searcher")
    name = searcher.get("name") if isinstance(searcher, dict) else None
    return name if isinstance(name, str) else None


# --- the space of hyperparameters

_CONSTANTS_ONLY = ("points",)
"""The searchers that take no ranges."""


class _Kind(NamedTuple):
    """The keys of one type of hyperparameter."""

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()

    @property
    def keys(self) -> list[str]:
        return ["type", *self.required, *self.optional]


KINDS = {
    "const": _Kind(("val",)),
    "categorical": _Kind(("vals",)),
    "int": _Kind(("minval", "maxval"), ("count",)),
    "double": _Kind(("minval", "maxval"), ("count",)),
    "log": _Kind(("minval", "maxval"), ("base", "count")),
}
_NO_RANGE = "for a constant map that has a key `type`, give {type: const, val: {...}}"
_GIVE = {
    "val": "give the constant's value",
    "vals": "give the list of values",
    "minval": "give the lowest value; for type log, its exponent",
    "maxval": "give the highest value; for type log, its exponent",
}


def space_problems(hyperparameters: Any, searcher_name: str, path: str = "hyperparameters") -> Iterator[Problem]:
    """Yield the problems of the hyperparameters for this searcher.

    A constant is a scalar, a list, null, or {type: const, val: ...}; a map without `type` is nested. The schema reports
    `hyperparameters` that are not a map.
    """
    for name, spec in hyperparameters.items() if isinstance(hyperparameters, dict) else ():
        if isinstance(spec, dict) and "type" in spec:
            yield from _problems(spec, searcher_name, f"{path}.{name}")
        else:
            yield from space_problems(spec, searcher_name, f"{path}.{name}")
            yield from _problems_in_list(spec, searcher_name, f"{path}.{name}")


def _problems_in_list(constant: Any, searcher_name: str, path: str) -> Iterator[Problem]:
    """Yield a problem for each range without a count in a list, for the grid searcher as in Determined."""
    for where, kind, spec in _ranges_in_lists(constant, path):
        if searcher_name == "grid" and kind in ("int", "double", "log"):
            yield from _count_problems({"count": spec.get("count")}, kind, searcher_name, where)


def range_in_list_notes(hyperparameters: Any) -> Iterator[str]:
    """Yield a note for each element of a list that looks like a range: a list is a constant, as in Determined."""
    for where, kind, _spec in _ranges_in_lists(hyperparameters, "hyperparameters"):
        yield (
            f"{where}: {{type: {kind}, ...}} in a list is not searched: the trial gets the map itself; give the range "
            "a name of its own, or use {type: categorical, vals: [...]} with whole lists as values"
        )


def _ranges_in_lists(spec: Any, path: str, in_list: bool = False) -> Iterator[tuple[str, str, Tree]]:
    """Yield path, type and map of each element of a list, at any depth, that is written like a hyperparameter."""
    if isinstance(spec, list):
        for i, element in enumerate(spec):
            yield from _ranges_in_lists(element, f"{path}[{i}]", in_list=True)
    elif isinstance(spec, dict) and in_list and spec.get("type") in KINDS:
        yield path, spec["type"], spec
    elif isinstance(spec, dict) and "type" not in spec:
        for key, value in spec.items():
            yield from _ranges_in_lists(value, join(path, key), in_list)


_DRAWING = ("random", "async_halving", "adaptive_asha", "optuna")
"""The searchers that draw hyperparameters from ranges."""


def constant_notes(hyperparameters: Any, searcher: Tree) -> list[str]:
    """Return a note if the searcher has no range from which to choose hyperparameters."""
    name, trials = searcher.get("name"), searcher.get("max_trials")
    if name not in (*_DRAWING, "grid") or _has_range(hyperparameters) or (name in _DRAWING and trials == 1):
        return []
    found = "it trains one trial" if name == "grid" else f"its {count(trials or 0, 'trial')} differ only in their seeds"
    return [
        f"searcher.name: {name} has nothing to search: no hyperparameter is a range, so {found}; give one a range such "
        "as {type: double, minval: 0, maxval: 1}, or use `name: single`"
    ]


_SMALLEST_EXPONENT, _LARGEST_VALUE = 0.1, 1e16
"""Bounds of a `log` range that were probably written as values: a lower exponent between 0 and the first, or a largest
value above the second.

Nobody needs a range from 10 ** 0.1 = 1.26, or one up to numbers that floats cannot count one by one.
"""


def log_notes(hyperparameters: Any, path: str = "hyperparameters") -> Iterator[str]:
    """Yield a note for each `log` range, valid otherwise, whose bounds look like values and not like exponents.

    That is so for bounds from 0 to 1, for a lower bound of at most _SMALLEST_EXPONENT, and for values that are too
    large. Bounds of 0 and below are exponents.
    """
    for name, spec in hyperparameters.items() if isinstance(hyperparameters, dict) else ():
        if not isinstance(spec, dict) or "type" not in spec:
            yield from log_notes(spec, f"{path}.{name}")
        elif spec["type"] == "log":
            low, high, base = spec["minval"], spec["maxval"], spec.get("base") or 10
            are_values = low > 0 and (high <= 1 or low <= _SMALLEST_EXPONENT or base**high > _LARGEST_VALUE)
            if are_values and base > 1:
                yield (
                    f"{path}.{name}: minval {low:g} and maxval {high:g} of a log range are exponents of base {base:g}, "
                    f"so values are from {base**low:.4g} to {base**high:.4g}; for values from {low:g} to {high:g}, use "
                    f"minval: {math.log(low, base):.4g} and maxval: {math.log(high, base):.4g}"
                )


def _has_range(spec: Any) -> bool:
    if not isinstance(spec, dict):
        return False
    return spec["type"] != "const" if "type" in spec else any(map(_has_range, spec.values()))


def _problems(spec: dict[str, Any], searcher_name: str, path: str) -> Iterator[Problem]:
    kind = spec["type"]
    if not isinstance(kind, str) or kind not in KINDS:
        yield Problem(f"{path}.type", f"got {shown(kind)}", f"expected one of {', '.join(KINDS)}; {_NO_RANGE}")
        return
    if kind != "const" and searcher_name in _CONSTANTS_ONLY:
        yield Problem(
            f"{path}.type",
            f"{shown(kind)} is a range to search, and the {searcher_name} searcher needs constants",
            "give `type: const` and `val`",
        )
        return
    yield from _key_problems(spec, KINDS[kind], path)
    if kind == "categorical":
        yield from _vals_problems(spec, path)
    elif kind != "const":
        yield from _range_problems(spec, kind, path)
        yield from _count_problems(spec, kind, searcher_name, path)


def _key_problems(spec: dict[str, Any], kind: _Kind, path: str) -> Iterator[Problem]:
    for key in kind.required:
        if key not in spec:
            yield Problem(f"{path}.{key}", MISSING, _GIVE[key])
    for key in spec:
        if key not in kind.keys:
            meant = nearest(str(key), kind.keys) or f"known: {', '.join(kind.keys)}"
            yield Problem(f"{path}.{key}", f"unknown key {key!r}", meant)


def _vals_problems(spec: dict[str, Any], path: str) -> Iterator[Problem]:
    if "vals" in spec and not (isinstance(spec["vals"], list) and spec["vals"]):
        yield Problem(f"{path}.vals", f"got {shown(spec['vals'])}", "expected a list of at least one value")


def _range_problems(spec: dict[str, Any], kind: str, path: str) -> Iterator[Problem]:
    is_right, expected = (_is_int64, "a whole number of 64 bits") if kind == "int" else (_is_number, "a number")
    wrong = [key for key in ("minval", "maxval") if key in spec and not is_right(spec[key])]
    for key in wrong:
        yield Problem(f"{path}.{key}", f"got {shown(spec[key])}", f"expected {expected}")
    base: Any = 10
    if kind == "log" and spec.get("base") is not None:
        base = spec["base"]
    if not (_is_number(base) and base > 0):
        yield Problem(f"{path}.base", f"got {shown(base)}", "expected a number above 0")
    elif not wrong and "minval" in spec and "maxval" in spec:
        yield from _ends_problems(spec["minval"], spec["maxval"], base if kind == "log" else None, path)


def _ends_problems(low: float, high: float, base: float | None, path: str) -> Iterator[Problem]:
    """Yield the problem of a range whose ends are numbers. `base` is None unless the ends are exponents of it."""
    if low >= high:
        yield Problem(
            f"{path}.minval", f"{low} is not below maxval {high}", "swap them, or give `type: const` for one value"
        )
    elif base is None and not math.isfinite(float(high) - float(low)):
        # Samplers compute the width of the range, which must not overflow to infinity.
        yield Problem(f"{path}.maxval", f"{high} - {low} is not a finite number", "narrow the range")
    elif base is not None and not (_has_power(base, low) and _has_power(base, high)):
        powers = f"{base} ** {low} and {base} ** {high} are not both finite"
        yield Problem(f"{path}.maxval", powers, "minval and maxval of a log are exponents")


def _has_power(base: float, exponent: float) -> bool:
    try:
        return math.isfinite(float(base) ** float(exponent))
    except OverflowError:
        return False


def _count_problems(spec: dict[str, Any], kind: str, searcher_name: str, path: str) -> Iterator[Problem]:
    count = spec.get("count")
    if count is None and searcher_name == "grid":
        yield Problem(
            f"{path}.count",
            f"a count was not provided, and the grid searcher needs one for {kind}",
            "give the number of points",
        )
    elif count is not None and (type(count) is not int or count < 1):
        yield Problem(f"{path}.count", f"got {shown(count)}", "expected a whole number >= 1")


def _is_int64(value: Any) -> bool:
    # type() and not isinstance: True and False are instances of int.
    return type(value) is int and -(2**63) <= value < 2**63


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max
