"""The effective configuration: schema defaults < cluster profile < template < config, with the origin of each value."""

from __future__ import annotations

import functools
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from hpc_det.config.batch_sizes import batch_notes
from hpc_det.config.checks import (
    FREE_FORM,
    constant_notes,
    log_notes,
    range_in_list_notes,
    searcher_name,
    space_problems,
    text_problems,
)
from hpc_det.config.cluster import Cluster
from hpc_det.config.cluster_choice import ChosenCluster
from hpc_det.config.cross_checks import cross_problems
from hpc_det.config.determined_keys import in_todays_names, notes
from hpc_det.config.determined_uses import Uses, missing_uses
from hpc_det.config.entrypoint import Context, trial_name
from hpc_det.config.idle_script import idle_script_note
from hpc_det.config.interpolation import unresolved_notes
from hpc_det.config.local_slots import with_local_slots
from hpc_det.config.merge import Merged, Tree, leaves, merge, merge_layers
from hpc_det.config.plain_yaml import key_lines
from hpc_det.config.problems import render, schema_problems
from hpc_det.config.rank_variables import COMPAT, DETERMINED
from hpc_det.config.request import Request
from hpc_det.config.schema import LOG_POLICIES, Experiment
from hpc_det.config.searchers import COMPARING
from hpc_det.config.secrets import shown_at
from hpc_det.config.section import Section
from hpc_det.config.trial_code import (
    check_entrypoint,
    entrypoint_notes,
    metric_notes,
    silent_script,
    speaks_determined,
)
from hpc_det.errors import Problem, UsageError, nearest
from hpc_det.plan.pool import in_its_pool, pool_notes, pool_problems

Model = TypeVar("Model", bound=Section)
_COMPAT = f"{COMPAT}={DETERMINED}"
_HANDS = ("cluster", "template", "config")
"""The layers that a person has written; notes are only about their keys."""


@dataclass(frozen=True, kw_only=True)
class Effective:
    """A valid experiment on a valid cluster; `origins` contains the layer of every leaf of `tree`."""

    experiment: Experiment
    cluster: Cluster
    tree: Tree
    origins: dict[str, str]
    notes: list[str]
    """A line for each explicit key that has no effect here, and other notes for the user."""
    context_dir: Path
    profile: Tree = field(default_factory=dict)
    """The cluster profile with all its pools, and with the slots of this machine if it is for this machine."""
    choice: str = ""
    """The cluster and why it is used, in words; empty if the user has named it and nothing was found out."""
    includes: tuple[Path, ...] = ()
    points: list[Tree] = field(default_factory=list)
    """For each trial of a multirun or sweep, the sections that differ from the experiment's, and always
    `hyperparameters`.
    """

    @property
    def context(self) -> Context:
        return Context(self.context_dir, self.includes)

    def searchers_code(self) -> Path:
        """Return the folder in which the class of a custom search method is looked up."""
        module, _, _ = (self.tree["searcher"].get("class") or "").partition(":")
        return self.context.folder_of(f"{module.replace('.', '/')}.py")


def effective(request: Request) -> Effective:
    """Merge and validate the layers. Raises UsageError with every problem.

    The layer "cluster" is the profile's `experiment` section, overridden by the profile's own pool, time limit and
    variables.
    """
    problems: list[Problem] = []
    local = with_local_slots(request.cluster, _slots_per_trial(request), os.environ)
    profile, cluster = _profile(local.profile, problems)
    # The keys of an invalid profile may have any type, so they are not merged; its problems are reported anyway.
    site = merge(_site_defaults(request.cluster, problems), {} if problems else _of_every_job(profile))
    layers = [("cluster", site), ("template", request.template or {}), ("config", request.config), *request.overrides]
    merged = _merged([(name, in_todays_names(tree)) for name, tree in layers], request)
    experiment = _validated(Experiment, merged.tree, "", problems)
    problems += text_problems(merged.tree)
    problems += space_problems(merged.tree.get("hyperparameters"), searcher_name(merged.tree) or "single")
    problems += cross_problems(merged.tree, profile)
    written = _written(merged)
    uses = _determined_uses(merged.tree, request.context)
    lines = [
        *render(problems, _source(request, written), functools.partial(_in_its_layer, written)),
        *_code_problems(merged.tree, request.context),
        *uses.problems,
    ]
    if experiment and cluster:
        lines += pool_problems(experiment, cluster)
        cluster = in_its_pool(experiment, cluster)
    if lines or cluster is None or experiment is None:
        raise UsageError(lines)
    tree = experiment.model_dump(mode="json", by_alias=True)
    by_hand = [path for path, layer in written.items() if layer in _HANDS]
    origins = {path: _origin(path, written, request.sources) for path, _value in leaves(tree)}
    return Effective(
        experiment=experiment,
        cluster=cluster,
        tree=tree,
        origins=origins,
        profile=profile,
        choice=_choice(cluster.name, request.chosen, local.devices),
        notes=[
            *filter(None, [local.note]),
            *notes(merged.tree, by_hand, cluster.scheduler),
            *pool_notes(experiment, cluster),
            *_bundle_notes(experiment, cluster),
            *batch_notes(tree, request.context),
            *log_notes(tree["hyperparameters"]),
            *constant_notes(tree["hyperparameters"], tree["searcher"]),
            *range_in_list_notes(tree["hyperparameters"]),
            *unresolved_notes(tree, origins),
            *_hook_notes(tree["notify"], request.context, functools.partial(_in_its_layer, written)),
            *entrypoint_notes(tree.get("entrypoint"), request.context, _python_path(tree)),
            *uses.notes,
            *filter(None, [idle_script_note(tree.get("entrypoint"), request.context)]),
            *metric_notes(tree.get("entrypoint"), request.context, tree["searcher"]["metric"]),
        ],
        context_dir=request.context_dir,
        includes=request.includes,
    )


def _slots_per_trial(request: Request) -> int:
    """Return the slots that the layers request for a trial; 1 if none is a number, which the schema reports."""
    layers = [request.cluster.get("experiment"), request.template, request.config]
    layers += [tree for _name, tree in request.overrides]
    sections = (layer.get("resources") for layer in reversed(layers) if isinstance(layer, dict))
    found = (section.get("slots_per_trial") for section in sections if isinstance(section, dict))
    return next((slots for slots in found if type(slots) is int), 1)


def _choice(cluster: str, chosen: ChosenCluster | None, devices: str) -> str:
    reasons = ", ".join(filter(None, [chosen.reason if chosen else "", f"with {devices}" if devices else ""]))
    return f"{chosen.name if chosen else cluster} ({reasons})" if reasons else ""


def valid_profile(tree: Tree) -> Cluster:
    """Return a cluster profile, validated alone. Raises UsageError with every problem."""
    problems: list[Problem] = []
    _tree, cluster = _profile(with_local_slots(tree, 1, os.environ).profile, problems)
    _site_defaults(tree, problems)
    if problems or cluster is None:
        raise UsageError(render(problems, lambda path: None))
    return cluster


def _profile(written: Tree, problems: list[Problem]) -> tuple[Tree, Cluster | None]:
    """Return the profile without its `experiment` section, and its validated form."""
    tree = {key: value for key, value in written.items() if key != "experiment"}
    cluster = _validated(Cluster, tree, "cluster", problems)
    problems += text_problems(tree, "cluster")
    return tree, cluster


def _merged(layers: Sequence[tuple[str, Tree]], request: Request) -> Merged:
    """Merge the layers over the defaults that the schema cannot express and over what the entrypoint needs."""
    merged = merge_layers(layers)
    entrypoint = merged.tree.get("entrypoint")
    defaults: Tree = {"name": request.default_name or _trial_class(entrypoint), "log_policies": LOG_POLICIES}
    lowest = [("default", defaults)]
    if speaks_determined(entrypoint, request.context) and not _says_compat(merged):
        lowest.append(("entrypoint", {"environment": {"environment_variables": [_COMPAT]}}))
    return merge_layers([*lowest, *layers])


def _says_compat(merged: Merged) -> bool:
    """Return whether the variables contain HPC_DET_COMPAT, as in the effective configuration of an experiment that is
    repeated.
    """
    return any(value == _COMPAT for _path, value in leaves(merged.tree.get("environment")))


def _determined_uses(tree: Tree, context: Context) -> Uses:
    values = [value for _path, value in leaves(tree.get("environment")) if isinstance(value, str)]
    settings = [value for value in values if value.startswith(f"{COMPAT}=")]  # the last one counts
    if settings and DETERMINED not in settings[-1]:  # the user wants Determined's own package
        return Uses()
    return missing_uses(tree.get("entrypoint"), context, is_enabled=bool(settings))


def _trial_class(entrypoint: object) -> str | None:
    with suppress(ValueError):  # of an entrypoint that is no command
        name = trial_name(entrypoint)
        return name.rpartition(":")[2] if name else None
    return None


def _site_defaults(profile: Tree, problems: list[Problem]) -> Tree:
    defaults = profile.get("experiment") or {}
    if isinstance(defaults, dict):
        return defaults
    problems.append(
        Problem(
            "cluster.experiment",
            f"got {shown_at('cluster.experiment', defaults)}",
            "expected a map of experiment settings",
        )
    )
    return {}


def _of_every_job(profile: Tree) -> Tree:
    """Return the keys of a profile that experiments have too, and may override."""
    default = next((name for name, pool in (profile.get("pools") or {}).items() if pool.get("default")), None)
    return {
        "resources": {
            "resource_pool": profile.get("resource_pool") or default,
            "time_limit": profile.get("time_limit"),
        },
        "environment": {"environment_variables": profile.get("environment_variables")},
    }


def _validated(model: type[Model], tree: Tree, prefix: str, problems: list[Problem]) -> Model | None:
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        problems += schema_problems(model, error, prefix)
        return None


def _code_problems(tree: Tree, context: Context) -> list[str]:
    folder = str(context.folder)
    if not context.folder.is_dir():
        meant = f" ({close})" if (close := nearest(context.folder.name, _folders_in(context.folder.parent))) else ""
        return [f"context_dir: {folder!r} is not a folder{meant}; give the folder of the trial's code"]
    return [*check_entrypoint(tree.get("entrypoint"), context), *_uncompared(tree, context)]


def _python_path(tree: Tree) -> list[str]:
    """Return the entries of PYTHONPATH in the environment variables."""
    values = [value for _path, value in leaves(tree.get("environment")) if isinstance(value, str)]
    return [entry for value in values if value.startswith("PYTHONPATH=") for entry in value.split("=", 1)[1].split(":")]


def _folders_in(folder: Path) -> list[str]:
    """Return the names of the folders in it; none if it cannot be read."""
    with suppress(OSError), os.scandir(folder) as entries:
        return [entry.name for entry in entries if entry.is_dir()]
    return []


def _bundle_notes(experiment: Experiment, cluster: Cluster) -> Iterator[str]:
    environment = experiment.environment
    if environment.image_for(cluster.slot_type):
        for key, is_set in (("bundle", environment.bundle), ("stage", environment.stage != "none")):
            if is_set:
                yield f"environment.{key}: has no effect with environment.image: ranks use the container's packages"


def _hook_notes(hooks: Sequence[Tree], context: Context, place: Callable[[str], str]) -> Iterator[str]:
    """Yield a note for each hook whose program is given as a path, and cannot be run."""
    for i, hook in enumerate(hooks):
        program, key = (hook.get("command") or [""])[0], place(f"notify[{i}].command")
        if "/" not in program:
            continue
        file = context.path(program)
        if not os.path.isfile(file):  # unlike Path.is_file, False for a folder that may not be read
            yield f"{key}: {program!r} is not a file here ({file}); the nodes of the job need it"
        elif not os.access(file, os.X_OK):
            yield f"{key}: {file} is not executable; run `chmod +x {shlex.quote(str(file))}`"


def _uncompared(tree: Tree, context: Context) -> list[str]:
    name = searcher_name(tree)
    script = silent_script(tree.get("entrypoint"), context) if name in COMPARING else None
    if script is None:
        return []
    return [
        f"searcher.name: {name} compares trials by searcher.metric, but {script} reports no metric: neither the "
        f"script nor its imports from context_dir import hpc_det; train with hpc_det.pytorch.Trainer, name a trial as "
        f"module:Class, or use a searcher without comparison (single, grid, random)"
    ]


def _source(request: Request, written: dict[str, str]) -> Callable[[str], str | None]:
    """Return a function from a path to the names of the layers that set it, for messages."""
    names = {
        "cluster": f"cluster {request.cluster.get('name')!r}",
        "template": f"template {request.template_name!r}",
    }
    config = _config_source(request)
    profile = {f"cluster.{path}": "cluster" for path, value in leaves(request.cluster) if value is not None}
    written = {**profile, **written}

    def source(path: str) -> str | None:
        below = (f"{path}.", f"{path}[")
        element = path[: path.rfind("]") + 1]  # the layer of an element is the layer of everything in it
        layers = {written.get(path), written.get(element)} - {None}
        layers = layers or {written[leaf] for leaf in written if leaf.startswith(below)}
        named = [names[layer] for layer in ("cluster", "template") if layer in layers]
        named += [config(path)] if "config" in layers else []
        named += [f"--{name}" for name, _tree in request.overrides if name in layers]
        return " and ".join(named) or None

    return source


def _in_its_layer(written: dict[str, str], path: str) -> str:
    """Return the path of a value with its place in the list of the layer that wrote it."""
    found = re.match(r"(.+?)\[(\d+)\](.*)", path)
    if found is None or (layer := written.get(f"{found[1]}[{found[2]}]")) is None:
        return path
    before = sum(written.get(f"{found[1]}[{i}]") == layer for i in range(int(found[2])))
    return f"{found[1]}[{before}]{found[3]}"


def _config_source(request: Request) -> Callable[[str], str]:
    """Return a function from a path to the file and line of the config, or the --config option, that set it."""

    lines = functools.cache(lambda: key_lines(request.config_text))

    def source(path: str) -> str:
        for key in reversed(request.config_keys):
            if path == key or path.startswith((f"{key}.", f"{key}[")):
                return f"--config {key}"
        if request.config_file is None:
            return "config"
        while path and path not in lines():
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return f"{request.config_file}:{lines()[path]}" if path else str(request.config_file)

    return source


def _written(merged: Merged) -> dict[str, str]:
    """Return the layer of each explicit value. Outside the free-form sections, null means unset in any layer."""
    return {
        path: merged.origins[path]
        for path, value in leaves(merged.tree)
        if path in merged.origins and (value is not None or path.split(".")[0] in FREE_FORM)
    }


def _origin(path: str, written: dict[str, str], sources: Mapping[str, str]) -> str:
    """Return the layer of a value, and the interpolation that it was written with, such as "config, ${oc.env:HOME}"."""
    # The value 100 of a length is {batches: 100} in the tree, so the leaf has the origin of its parent.
    layer = written.get(path) or written.get(path.rpartition(".")[0]) or "default"
    source = sources.get({"template": f"template.{path}", "cluster": f"cluster.experiment.{path}"}.get(layer, path))
    # The elements of a list have other places in their layers.
    return f"{layer}, {source}" if layer in _HANDS and source and "[" not in path else layer
