"""The points of a Hydra multirun: its overrides as axes, each combination of values as a request.

Composing takes tens of milliseconds. So Hydra composes one point for each combination of groups, and the other points
are copies of its tree with their own values. Where such a copy might differ from what Hydra would compose, Hydra
composes every point.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hydra.core.override_parser.types import Glob, Override, QuotedString, Transformer

from hpc_det.config.cluster_choice import chosen_cluster
from hpc_det.config.compose import Composed, Composer, is_linked, opened
from hpc_det.config.interpolation import Resolved, texts
from hpc_det.config.merge import Tree
from hpc_det.config.request import Request, of_composed
from hpc_det.errors import UsageError
from hpc_det.plan.multirun import Point, ProblemsOfPoints

MOST_POINTS = 100_000
_PLUGINS = ("hydra.sweeper", "hydra/sweeper", "hydra.launcher", "hydra/launcher")


@dataclass(frozen=True, kw_only=True)
class _Axis:
    """One override with all its values; a fixed override has one, the text of the override itself."""

    key: str
    """The key with its sign, as the user wrote it."""
    path: str
    written: tuple[str, ...]
    """An override with each of the values, as text."""
    values: tuple[Any, ...] = ()
    """The values as the configuration has them; empty for a fixed override."""
    is_swept: bool
    is_group: bool

    @property
    def is_plain(self) -> bool:
        """True if each value replaces what the tree has. Hydra merges maps, and raises an error for `???`."""
        values = list(self.values)
        is_of_a_kind = len({isinstance(value, list) for value in values}) == 1
        has_maps = any(isinstance(value, dict) for value in values)
        is_literal = not is_linked(values) and "???" not in dict(texts(values)).values()
        return is_of_a_kind and not has_maps and is_literal and not self.key.startswith("~")


_Choice = tuple[int, ...]
"""For each axis, the index of the value."""


def points(overrides: Sequence[str], env: Mapping[str, str]) -> list[Point]:
    """Return the points in the order of Hydra's own sweeper: the last axis varies fastest. Raises UsageError with every
    problem.
    """
    with opened(env, partial(chosen_cluster, None, env)) as composer:
        return _Points(composer, _axes(composer, overrides)).all()


def _axes(composer: Composer, overrides: Sequence[str]) -> list[_Axis]:
    """Return an axis for each key. Of several overrides of a key the last one counts, as in Hydra's sweeper."""
    parsed = composer.parse(overrides)
    problems = [problem for override in parsed for problem in _refused(override)]
    if problems:
        raise UsageError(problems)
    axes = list({override.get_key_element(): _axis(composer, override) for override in parsed}.values())
    problems = [f"{axis.key}: the sweep has no values; give at least one" for axis in axes if not axis.written]
    if math.prod(len(axis.written) for axis in axes) > MOST_POINTS:
        problems.append(f"--multirun: more than {MOST_POINTS} points; give fewer values, or use a searcher")
    if problems:
        raise UsageError(problems)
    return axes


def _refused(override: Override) -> Iterator[str]:
    written = override.input_line
    if override.key_or_group.startswith(_PLUGINS):
        yield (
            f"{written}: `hpc-det run -m` makes one experiment with a trial for each point and uses no Hydra "
            "plugins; sweepers and launchers are for your own apps: hydra/launcher=hpc_slurm"
        )
    elif override.is_hydra_override() and override.is_sweep_override():
        yield f"{written}: Hydra's own settings cannot be swept; remove it"
    elif override.is_sweep_override() and not override.is_discrete_sweep():
        yield (
            f"{written}: an interval needs a sweeper that optimises; give values or a range, such as "
            f"{override.get_key_element()}=range(0,1,0.25)"
        )


def _axis(composer: Composer, override: Override) -> _Axis:
    key, path = override.get_key_element(), override.key_or_group
    options = composer.options(path)
    is_group = bool(options) or override.package is not None
    if not override.is_sweep_override():
        return _Axis(key=key, path=path, written=(str(override.input_line),), is_swept=False, is_group=is_group)
    glob = override.value()
    elements = glob.filter(options) if isinstance(glob, Glob) else override.sweep_iterator()
    found = list(itertools.islice(elements, MOST_POINTS + 1))  # a range may have any number
    if any(isinstance(element, Glob) for element in found):
        raise UsageError(f"{override.input_line}: glob() cannot be combined with other values; write the values out")
    return _Axis(
        key=key,
        path=path,
        written=tuple(f"{key}={Transformer.str(element)}" for element in found),
        values=tuple(map(_value, found)),
        is_swept=True,
        is_group=is_group,
    )


def _value(element: Any) -> Any:
    """Return the value that an element of an axis has in the configuration."""
    if isinstance(element, QuotedString):
        return element.text
    if isinstance(element, list):
        return [_value(item) for item in element]
    if isinstance(element, dict):
        return {_value(key): _value(item) for key, item in element.items()}
    return element


@dataclass(frozen=True, kw_only=True)
class _Base:
    """The first point of a combination of groups."""

    composed: Composed
    is_plain: bool
    """True if the other points are copies of this one with their own values."""


class _Points:
    def __init__(self, composer: Composer, axes: list[_Axis]) -> None:
        self._composer = composer
        self._axes = axes
        self._varied = [i for i, axis in enumerate(axes) if axis.is_swept and not axis.is_group]
        self._groups = [i for i, axis in enumerate(axes) if axis.is_group]
        self._are_plain = all(axes[i].is_plain and self._stands_alone(i) for i in self._varied)
        self._bases: dict[_Choice, _Base | UsageError] = {}

    def all(self) -> list[Point]:
        problems = ProblemsOfPoints()
        found = []
        for choice in itertools.product(*(range(len(axis.written)) for axis in self._axes)):
            swept = tuple(axis.written[k] for axis, k in zip(self._axes, choice, strict=True) if axis.is_swept)
            with problems.of(swept):
                found.append(Point(overrides=swept, request=self._request(choice)))
        problems.raise_any()
        return found

    def _stands_alone(self, i: int) -> bool:
        """Return whether no other override sets this key, a key above it or a key below it."""
        mine = f"{self._axes[i].path}."
        others = [f"{axis.path}." for k, axis in enumerate(self._axes) if k != i and not axis.is_group]
        return not any(mine.startswith(other) or other.startswith(mine) for other in others)

    def _request(self, choice: _Choice) -> Request:
        groups = tuple(choice[i] for i in self._groups)
        is_first = groups not in self._bases
        if is_first:
            self._bases[groups] = self._base(choice)
        base = self._bases[groups]
        if isinstance(base, UsageError):  # all points of these groups have it
            raise base
        if is_first or base.is_plain:
            found = base.composed
            if base.is_plain:
                tree = self._with_values(found.found.tree, choice)
                found = replace(found, found=Resolved(tree=tree, sources=found.found.sources))
        else:
            found = self._compose(choice)
        return of_composed(found)

    def _base(self, choice: _Choice) -> _Base | UsageError:
        try:
            composed = self._compose(choice)
        except UsageError as error:
            return error
        is_plain = self._are_plain and not composed.is_linked and self._has_values(composed.found.tree, choice)
        return _Base(composed=composed, is_plain=is_plain)

    def _compose(self, choice: _Choice) -> Composed:
        return self._composer.compose([axis.written[k] for axis, k in zip(self._axes, choice, strict=True)])

    def _has_values(self, tree: Tree, choice: _Choice) -> bool:
        """Return whether Hydra placed each value unchanged at the path of its override."""
        values = [(self._axes[i].path, self._axes[i].values[choice[i]]) for i in self._varied]
        # As text, because 1, 1.0 and True are equal in Python and differ in a configuration.
        return all(repr(_at(tree, path)) == repr(value) for path, value in values)

    def _with_values(self, tree: Tree, choice: _Choice) -> Tree:
        for i in self._varied:
            tree = _placed(tree, self._axes[i].path, self._axes[i].values[choice[i]])
        return tree


_NOTHING = object()


def _at(tree: Any, path: str) -> Any:
    for key in path.split("."):
        tree = tree.get(key, _NOTHING) if isinstance(tree, dict) else _NOTHING
    return tree


def _placed(tree: Any, path: str, value: Any) -> Tree:
    """Return the tree with the value at the path; subtrees that do not change are shared with the given tree."""
    key, _dot, below = path.partition(".")
    tree = tree if isinstance(tree, dict) else {}
    return {**tree, key: _placed(tree.get(key), below, value) if below else value}
