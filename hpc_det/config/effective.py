"""The effective configuration: schema defaults < cluster profile < template < config, and who wrote each value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from hpc_det import compat
from hpc_det.config.checks import FREE_FORM, cross_problems, hyperparameter_problems, text_problems
from hpc_det.config.cluster import Cluster
from hpc_det.config.entrypoint import check_entrypoint, speaks_determined
from hpc_det.config.merge import Merged, Tree, leaves, merge, merge_layers
from hpc_det.config.problems import Problem, render, schema_problems, shown
from hpc_det.config.request import Request
from hpc_det.config.schema import Experiment
from hpc_det.errors import UsageError
from hpc_det.plan.placement import place

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True, kw_only=True)
class Effective:
    """A valid experiment on a valid cluster; `origins` has the layer of every leaf of `tree`."""

    experiment: Experiment
    cluster: Cluster
    tree: Tree
    origins: dict[str, str]
    context_dir: Path


def effective(request: Request) -> Effective:
    """Merge and validate; UsageError with every problem at once.

    The layer "cluster" is what a profile's `experiment` says, and over that its own pool, time limit and variables.
    """
    profile = {key: value for key, value in request.cluster.items() if key != "experiment"}
    problems: list[Problem] = []
    cluster = _validated(Cluster, profile, "cluster", problems)
    problems += text_problems(profile, "cluster")
    site = merge(_site_defaults(request.cluster, problems), {} if problems else _of_every_job(profile))
    merged = _merged([("cluster", site), ("template", request.template or {}), ("config", request.config)], request)
    experiment = _validated(Experiment, merged.tree, "", problems)
    problems += text_problems(merged.tree)
    problems += hyperparameter_problems(merged.tree.get("hyperparameters"))
    problems += cross_problems(merged.tree, profile)
    written = _written(merged)
    lines = render(problems, _source(request, written)) + _code_problems(merged.tree, request.context_dir)
    if experiment and cluster:
        lines += _placement_problems(experiment, cluster)
    if lines or cluster is None or experiment is None:
        raise UsageError(lines)
    tree = experiment.model_dump(mode="json")
    return Effective(
        experiment=experiment,
        cluster=cluster,
        tree=tree,
        origins={path: _origin(path, written) for path, _value in leaves(tree)},
        context_dir=request.context_dir,
    )


def _merged(layers: Sequence[tuple[str, Tree]], request: Request) -> Merged:
    """The layers, and below them all what the entrypoint that they say asks for."""
    merged = merge_layers(layers)
    if not speaks_determined(merged.tree.get("entrypoint"), request.context_dir):
        return merged
    variables = [f"{compat.VARIABLE}={compat.DETERMINED}"]
    return merge_layers([("entrypoint", {"environment": {"environment_variables": variables}}), *layers])


def _site_defaults(profile: Tree, problems: list[Problem]) -> Tree:
    defaults = profile.get("experiment") or {}
    if isinstance(defaults, dict):
        return defaults
    problems.append(Problem("cluster.experiment", f"got {shown(defaults)}", "expected a map of experiment settings"))
    return {}


def _of_every_job(profile: Tree) -> Tree:
    """The keys of a profile that an experiment has too, where its own values come first."""
    return {
        "resources": {key: profile.get(key) for key in ("resource_pool", "time_limit")},
        "environment": {"environment_variables": profile.get("environment_variables")},
    }


def _validated(model: type[Model], tree: Tree, prefix: str, problems: list[Problem]) -> Model | None:
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        problems += schema_problems(model, error, prefix)
        return None


def _placement_problems(experiment: Experiment, cluster: Cluster) -> list[str]:
    """What the cluster cannot give is the plan's rule; here it joins the other problems."""
    try:
        place(experiment, cluster)
    except UsageError as error:
        return error.problems
    return []


def _code_problems(tree: Tree, context_dir: Path) -> list[str]:
    if not context_dir.is_dir():
        hint = "; only `hpc-det run` resolves interpolations" if "${" in str(context_dir) else ""
        return [f"context_dir: {str(context_dir)!r} is not a folder; give the folder of the trial's code{hint}"]
    return check_entrypoint(tree.get("entrypoint"), context_dir)


def _source(request: Request, written: dict[str, str]) -> Callable[[str], str | None]:
    """Who wrote what stands at a path, as a message names it."""
    names = {
        "cluster": f"cluster {request.cluster.get('name')!r}",
        "template": f"template {request.template_name!r}",
        "config": "config",
    }
    profile = {f"cluster.{path}": "cluster" for path, value in leaves(request.cluster) if value is not None}
    written = {**profile, **written}

    def source(path: str) -> str | None:
        below = (f"{path}.", f"{path}[")
        layers = {written.get(path)} - {None} or {written[leaf] for leaf in written if leaf.startswith(below)}
        return " and ".join(names[layer] for layer in names if layer in layers) or None

    return source


def _written(merged: Merged) -> dict[str, str]:
    """Null means unset outside the free-form sections: nobody wrote it, whatever layer it stands in."""
    return {
        path: merged.origins[path]
        for path, value in leaves(merged.tree)
        if path in merged.origins and (value is not None or path.split(".")[0] in FREE_FORM)
    }


def _origin(path: str, written: dict[str, str]) -> str:
    # A length written as 100 is {batches: 100} in the tree: the writer of the one wrote the other.
    return written.get(path) or written.get(path.rpartition(".")[0]) or "default"
