"""`hpc-det run -m`: one experiment with a trial for each point of a Hydra multirun."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

from pydantic import ValidationError

from hpc_det.config.checks import space_problems, text_problems
from hpc_det.config.cross_checks import cross_problems
from hpc_det.config.determined_keys import in_todays_names
from hpc_det.config.merge import Tree, leaves, merge_layers
from hpc_det.config.problems import render
from hpc_det.config.request import Request
from hpc_det.config.schema import Experiment
from hpc_det.errors import UsageError, printable
from hpc_det.plan.effective import Effective, effective

OF_A_TRIAL = (
    "checkpoint_policy",
    "checkpoint_storage.save_experiment_best",
    "checkpoint_storage.save_trial_best",
    "checkpoint_storage.save_trial_latest",
    "data",
    "description",
    "hyperparameters",
    "labels",
    "max_restarts",
    "min_checkpoint_period",
    "checkpoint_interval",
    "asynchronous_checkpoints",
    "checkpoint_staging",
    "min_validation_period",
    "optimizations",
    "perform_initial_validation",
    "reproducibility",
    "scheduling_unit",
    "searcher.max_length",
)
"""Keys that may differ between points, because none of them changes the jobs."""
_SECTIONS = tuple(dict.fromkeys(path.partition(".")[0] for path in OF_A_TRIAL))


@dataclass(frozen=True, kw_only=True)
class Point:
    """The swept overrides as a user would write them, and the request of all overrides together."""

    overrides: tuple[str, ...]
    request: Request

    @property
    def config(self) -> Tree:
        return self.request.config


@dataclass(frozen=True, kw_only=True)
class Multirun:
    """The points of one multirun."""

    points: list[Point]
    """At least one point. Requests share what does not differ, so they are never changed in place."""

    @property
    def request(self) -> Request:
        """The request of the first point."""
        return self.points[0].request

    def with_requests(self, change: Callable[[Request], Request]) -> Multirun:
        """Return the multirun with `change`, such as `for_test`, applied to the request of each point."""
        return Multirun(points=[replace(point, request=change(point.request)) for point in self.points])


class Known(NamedTuple):
    """A point that was validated as a whole, reused for points that differ only in sections of a trial."""

    request: Request
    effective: Effective


def multirun_from_hydra(overrides: Sequence[str], env: Mapping[str, str]) -> Multirun:
    """Return the points of `hpc-det run -m` in the order of Hydra's sweeper. Raises UsageError with every problem."""
    from hpc_det.plan.axes import points  # no other command needs hydra

    return Multirun(points=points(overrides, env))


def effective_multirun(multirun: Multirun) -> Effective:
    """Merge and validate all points. Raises UsageError with every problem and its point.

    The result is the configuration of the first point; its `points` contain what differs in each. Points with the same
    jobs are validated together: the first one completely, the others only where they differ.
    """
    problems, known, trees = ProblemsOfPoints(), dict[str, Known](), list[Tree]()
    for point in multirun.points:
        with problems.of(point.overrides):
            trees.append(_of_constants(_tree(point.request, known)))
    problems.raise_any()
    kinds = [point.effective for point in known.values()]
    common = kinds[0]
    refused = [*_searcher_problems(common), *_shape_problems(multirun, kinds, trees)]
    if refused:
        raise UsageError(refused)
    return replace(common, points=[_differing(tree, common.tree) for tree in trees])


class ProblemsOfPoints:
    """The problems of points. A problem that all points share is reported once, without a point."""

    def __init__(self) -> None:
        self._points: list[tuple[str, ...]] = []
        self._of: dict[str, list[int]] = {}

    @contextmanager
    def of(self, overrides: tuple[str, ...]) -> Iterator[None]:
        """Collect the problems of the next point."""
        try:
            yield
        except UsageError as error:
            for line in dict.fromkeys(error.problems):
                self._of.setdefault(line, []).append(len(self._points))
        self._points.append(overrides)

    def raise_any(self) -> None:
        if self._of:
            raise UsageError([self._told(line, points) for line, points in self._of.items()])

    def _told(self, line: str, points: list[int]) -> str:
        if len(points) == len(self._points):
            return line
        first, *others = points
        more = f" and {len(others)} more" if others else ""
        return f"point {first + 1}{more} ({printable(' '.join(self._points[first]))}): {line}"


def _tree(request: Request, known: dict[str, Known]) -> Tree:
    """Return the effective configuration.

    `known` contains those of other points, by everything that is not specific to a trial.
    """
    above = [{key: value for key, value in layer.items() if key not in _SECTIONS} for layer in _own_layers(request)]
    # The key is only compared, so values that JSON cannot represent may be written by their repr.
    key = json.dumps([request.cluster, request.template, str(request.context_dir), *above], default=repr)
    if key not in known:
        known[key] = Known(request, effective(request))
        return known[key].effective.tree
    base = known[key]
    sections = _valid(base.effective.tree, _changed(request, base.request), request.cluster)
    return effective(request).tree if sections is None else {**base.effective.tree, **sections}


def _of_constants(tree: Tree) -> Tree:
    """Return the tree. Raises UsageError if a point leaves hyperparameters without a value."""
    if found := list(space_problems(tree["hyperparameters"], "points")):
        raise UsageError(render(found, lambda path: None))
    return tree


def _own_layers(request: Request) -> list[Tree]:
    return [request.config, *(layer for _name, layer in request.overrides)]


def _changed(request: Request, other: Request) -> Tree:
    """Return the merged sections in which the layers of the two requests differ."""
    own = list(zip(_own_layers(request), _own_layers(other), strict=True))
    # Requests share the sections in which they do not differ (`Multirun.points`), so comparing identities is enough.
    keys = [key for key in _SECTIONS if any(mine.get(key) is not theirs.get(key) for mine, theirs in own)]
    layers = [request.cluster.get("experiment") or {}, request.template or {}, *_own_layers(request)]
    return merge_layers([("", in_todays_names({key: layer.get(key) for key in keys})) for layer in layers]).tree


def _valid(base: Tree, changed: Tree, cluster: Tree) -> Tree | None:
    """Return the changed sections with their defaults; None if they are invalid, and `effective` finds the reason."""
    sections = _by_schema(base, changed)
    if sections is None:
        return None
    tree = {**base, **sections}
    checks = (
        text_problems(changed),
        space_problems(tree["hyperparameters"], tree["searcher"]["name"]),
        cross_problems(tree, cluster),
    )
    return None if any(problem for problems in checks for problem in problems) else sections


def _by_schema(base: Tree, changed: Tree) -> Tree | None:
    if list(changed) == ["hyperparameters"] and isinstance(changed["hyperparameters"], dict):
        return changed  # the schema leaves them free
    try:
        whole = Experiment.model_validate({**base, **changed}).model_dump(mode="json", by_alias=True)
    except ValidationError:
        return None
    return {key: whole[key] for key in changed}


def _searcher_problems(common: Effective) -> Iterator[str]:
    name = common.tree["searcher"]["name"]
    if name != "single":
        yield f"searcher.name: {name!r} creates the points of the search, and so does -m; use one of them"


def _shape_problems(multirun: Multirun, kinds: Sequence[Effective], trees: Sequence[Tree]) -> Iterator[str]:
    first = multirun.request
    if any(point.request.cluster != first.cluster for point in multirun.points):
        yield _differs("cluster")
    if any(kind.context_dir != kinds[0].context_dir for kind in kinds):
        yield _differs("context_dir")
    paths = {path: None for tree in trees for path in _differing_paths(trees[0], tree)}
    yield from (_differs(path) for path in paths if not _is_of_a_trial(path))


def _differing_paths(one: Tree, other: Tree) -> Iterator[str]:
    for key in one:
        if key not in OF_A_TRIAL and one[key] is not other[key] and one[key] != other[key]:
            mine, theirs = (dict(leaves({key: tree.get(key)})) for tree in (one, other))
            differing = (path for path in {**mine, **theirs} if mine.get(path) != theirs.get(path))
            yield from (path.partition("[")[0] for path in differing)


def _is_of_a_trial(path: str) -> bool:
    return any(path == known or path.startswith(f"{known}.") for known in OF_A_TRIAL)


def _differs(path: str) -> str:
    return f"{path} differs between points; the trials of a sweep have identical jobs; start a sweep for each value"


def _differing(tree: Tree, common: Tree) -> Tree:
    return {
        key: value
        for key, value in tree.items()
        if key == "hyperparameters" or (value is not common[key] and value != common[key])
    }
