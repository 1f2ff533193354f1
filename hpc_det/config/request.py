"""The layers of a configuration before the merge, from a YAML file with overrides or from a Hydra command line.

Cluster profiles and templates are files `conf/cluster/NAME.yaml` and `conf/template/NAME.yaml`: first of the user's
`$HPC_DET_ROOT/conf`, then of the site's folders in `$HPC_DET_SITE_CONF`, then of the project.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_det.config.cluster_choice import ChosenCluster, chosen_cluster
from hpc_det.config.conf_files import find
from hpc_det.config.entrypoint import Context
from hpc_det.config.interpolation import resolved
from hpc_det.config.merge import Tree, join, value_at
from hpc_det.config.plain_yaml import load_yaml, parse_map, parse_yaml, read_text
from hpc_det.config.secrets import shown_at
from hpc_det.errors import UsageError

if TYPE_CHECKING:
    from hpc_det.config.compose import Composed


@dataclass(frozen=True, kw_only=True)
class Request:
    """The layers as written; the trial's code is in `context_dir`."""

    cluster: Tree
    template: Tree | None
    template_name: str | None
    config: Tree
    context_dir: Path
    includes: tuple[Path, ...] = ()
    """Files and folders of a job besides those of `context_dir`, see hpc_det.config.entrypoint."""
    overrides: tuple[tuple[str, Tree], ...] = ()
    """Layers above the config with their names, such as those of --test and --local."""
    default_name: str | None = None
    """Name of the experiment if no layer sets one: the name of its file."""
    config_file: Path | None = None
    """File that contains the config, for messages; None for a config without a file."""
    config_text: str = ""
    """Content of that file. It is not read again: it may be a pipe."""
    config_keys: tuple[str, ...] = ()
    """Keys of the config that overrides such as --config set, for messages."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """The interpolation that each value was written with, by path, with `template.` or `cluster.` before the keys of a
    lower layer.
    """
    chosen: ChosenCluster | None = None
    """The choice of the cluster; None if Hydra's overrides name it, or an existing experiment has it."""

    @property
    def context(self) -> Context:
        return Context(self.context_dir, self.includes)


def from_file(
    path: Path,
    context_dir: Path | None,
    overrides: Sequence[str],
    template: str | None,
    cluster: str | None,
    env: Mapping[str, str],
) -> Request:
    """Return the request of the YAML file `path`, with `--config a.b=value` overrides.

    The context directory is the argument, else the file's `context_dir`, else the current directory. Interpolations
    such as `${oc.env:HOME}` are resolved as in `from_hydra`.
    """
    text = read_text(path)
    found = from_tree(parse_map(text, str(path)), context_dir, overrides, template, cluster, env, named=str(path))
    return replace(found, default_name=path.stem, config_file=path, config_text=text)


def from_tree(
    config: Tree,
    context_dir: Path | None,
    overrides: Sequence[str],
    template: str | None,
    cluster: str | None,
    env: Mapping[str, str],
    *,
    named: str = "config",
) -> Request:
    """Return the request of a configuration without a file, as `from_file` does. `named`: its name in messages."""
    config = deepcopy(config)
    for override in overrides:
        apply_override(config, override)
    chosen = chosen_cluster(cluster, env)
    profile = chosen.profile()
    if not config and template is None and not profile.get("experiment"):
        raise UsageError(f"{named}: is empty; expected at least an entrypoint and a searcher with its metric")
    below = None if template is None else _template(load_yaml(find("template", template, env)), template)
    found = resolved({**config, "cluster": profile, "template": below})
    # The keys `cluster` and `template` of a file are mistakes, which the schema reports.
    mistakes: Tree = {key: config[key] for key in ("cluster", "template") if key in config}
    config = {key: value for key, value in found.tree.items() if key not in ("cluster", "template", "context_dir")}
    config |= mistakes
    return Request(
        cluster=found.tree["cluster"],
        template=found.tree["template"],
        template_name=template,
        config=config,
        context_dir=_context_dir(context_dir or found.tree.get("context_dir")),
        config_keys=_keys_of(overrides),
        sources=found.sources,
        chosen=chosen,
    )


def from_hydra(overrides: Sequence[str], env: Mapping[str, str], cluster: str | None = None) -> Request:
    """Return the request that `conf/config.yaml` and Hydra's `overrides` compose. `cluster`: the profile's name, unless
    the overrides have one.
    """
    from hpc_det.config.compose import compose  # no other command needs hydra

    return of_composed(compose(overrides, env, partial(chosen_cluster, cluster, env)))


def of_composed(composed: Composed) -> Request:
    """Return the request of a tree that Hydra composed."""
    found, template_name = composed.found, composed.template_name
    config = dict(found.tree)
    cluster, template = config.pop("cluster", None) or {}, config.pop("template", None)
    return Request(
        cluster=cluster,
        template=_template(template, template_name or "") if template else None,
        template_name=template_name,
        context_dir=_context_dir(config.pop("context_dir", None)),
        # `data` and `hyperparameters` are empty maps in conf/config.yaml, so that overrides can add keys to them.
        config={key: value for key, value in config.items() if value != {}},
        sources=found.sources,
        chosen=composed.chosen,
    )


def from_stored(config: Tree, cluster: Tree, code: Path, overrides: Sequence[str]) -> Request:
    """Return the request of an existing experiment, from its effective configuration, with `--config a.b=value`
    overrides.
    """
    config, changes = deepcopy(config), Tree()
    for override in overrides:
        apply_override(changes, override)
    # The stored values are not resolved again: a text such as ${oc.env:HOME} in them is meant to stay.
    found = resolved(changes, below=config)
    for override in overrides:
        keys = override.partition("=")[0].split(".")
        _set(config, keys, value_at(found.tree, *keys), f"--config {'.'.join(keys)}")
    return Request(
        cluster=cluster,
        template=None,
        template_name=None,
        config=config,
        context_dir=code,
        config_keys=_keys_of(overrides),
        sources=found.sources,
    )


def with_includes(request: Request, paths: Sequence[Path]) -> Request:
    """Return the request with files and folders besides those of the context directory."""
    return replace(request, includes=tuple(Path(os.path.abspath(path)) for path in paths))


def for_test(request: Request) -> Request:
    """Return the request for a run that trains, validates and saves one batch, and keeps nothing."""
    description = request.config.get("description") or (request.template or {}).get("description") or ""
    overrides: Tree = {
        "description": f"[test-mode] {description}".strip(),
        "searcher": {"name": "single", "max_length": {"batches": 1}},
        "scheduling_unit": 1,
        "min_validation_period": {"batches": 0},
        "min_checkpoint_period": {"batches": 0},
        "perform_initial_validation": False,
        "checkpoint_storage": {"save_experiment_best": 0, "save_trial_best": 0, "save_trial_latest": 0},
        "max_restarts": 0,
        "environment": {"environment_variables": ["HPC_DET_TEST=1"]},  # for the ranks: hpc_det.core.run.Purpose
    }
    return _overridden(request, "test", overrides)


def on_one_slot(request: Request) -> Request:
    """Return the request for a run in this process, on one slot and without a container."""
    without = replace(
        request,
        cluster={**request.cluster, "experiment": _without_image(request.cluster.get("experiment"))},
        template=_without_image(request.template),
        config=_without_image(request.config),
    )
    return _overridden(without, "local", {"resources": {"slots_per_trial": 1}})


def on_slots(request: Request, slots: int) -> Request:
    """Return the request with another number of slots for each trial."""
    return _overridden(request, "ranks", {"resources": {"slots_per_trial": slots}})


def _without_image(layer: Any) -> Any:
    if not isinstance(layer, dict) or not isinstance(layer.get("environment"), dict):
        return layer
    return {**layer, "environment": {key: value for key, value in layer["environment"].items() if key != "image"}}


def _overridden(request: Request, name: str, overrides: Tree) -> Request:
    return replace(request, overrides=(*request.overrides, (name, overrides)))


def apply_override(config: Tree, override: str) -> None:
    """Set one `a.b=value` in place. The value is YAML, and missing maps are created."""
    dotted, equals, text = override.partition("=")
    *parents, last = dotted.split(".")
    if not equals or not all([*parents, last]):
        raise UsageError(f"--config {override}: expected KEY=VALUE, such as resources.slots_per_trial=2")
    _set(config, [*parents, last], parse_yaml(text, f"--config {dotted}"), f"--config {dotted}")


def _set(tree: Tree, keys: Sequence[str], value: Any, named: str) -> None:
    """Set a value in place. Missing maps are created. Raises UsageError, with `named`, if it is below a scalar."""
    *parents, last = keys
    walked = ""
    for key in parents:
        walked = join(walked, key)
        if tree.get(key) is None:
            tree[key] = {}
        if not isinstance(tree[key], dict):
            raise UsageError(
                f"{named}: {walked} is {shown_at(walked, tree[key])}, not a map, so no key can be set below it; set "
                f"{walked} itself"
            )
        tree = tree[key]
    tree[last] = value


def _keys_of(overrides: Sequence[str]) -> tuple[str, ...]:
    return tuple(override.partition("=")[0] for override in overrides)


def _template(tree: Tree, name: str) -> Tree:
    if "template" in tree:
        raise UsageError(
            f"template: template {name!r} names the template {tree['template']!r}, and a template cannot use another "
            "template; copy what it needs"
        )
    return tree


def _context_dir(written: object) -> Path:
    if written is not None and not isinstance(written, str | Path):
        raise UsageError(f"context_dir: got {written!r}; expected a folder")
    return Path(written or ".").expanduser().absolute()
