"""Determined's stored configurations (`det experiment config ID`) as experiment files: without defaults, in the
spelling of hpc_det.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from hpc_det.config.checks import FREE_FORM, text_problems
from hpc_det.config.cross_checks import cross_problems
from hpc_det.config.determined_keys import in_todays_names, is_default, is_default_image, without_effect
from hpc_det.config.interpolation import texts
from hpc_det.config.interpolation_text import escaped
from hpc_det.config.merge import Tree, join, leaves, value_at
from hpc_det.config.problems import render, schema_problems
from hpc_det.config.schema import LOG_POLICIES, Experiment
from hpc_det.config.secrets import MASK, masked_names
from hpc_det.errors import Problem, UsageError

_IMAGE = "Determined's default image; ranks run in the Python environment of hpc-det; set it again to use a container"
_MASKED = "the file has a mask in place of the secret; set it again"
_USELESS = {"resources.slots": "has no effect in Determined either; slots_per_trial counts"}
_DEFAULTS: Tree = {
    "min_validation_period": [0, {"batches": 0}],
    "min_checkpoint_period": [0, {"batches": 0}],
    "optimizations.tensor_fusion_threshold": [64],
    "log_policies": [LOG_POLICIES],
}
"""Defaults of Determined for keys that have an effect here, too, by path."""
OURS = {
    "min_checkpoint_period": "checkpoint_interval: auto applies",
    "optimizations.tensor_fusion_threshold": "buckets of DDP's default size apply",
}
"""By path, the value that applies instead of a default of Determined."""
_OWN_KEYS = ("context_dir",)
"""Keys of an experiment file that are not part of the schema."""
_OLD_KEYS = ("time_metric", "max_time")
_OLD_LENGTH = [f"searcher.{key}" for key in _OLD_KEYS]
_KEYS = {*Experiment.model_fields, "cluster", "template", *_OWN_KEYS}
_SEVERAL_DEVICES = ("image", "environment_variables")


@dataclass(frozen=True, kw_only=True)
class Imported:
    """An experiment file made from a stored configuration."""

    tree: Tree
    dropped: dict[str, str]
    """The reason for each key that was left out and has not its default value, by path."""
    defaults: list[str]
    """The keys that were left out because they have their default values."""
    renamed: dict[str, str]
    """The new key of each key that is spelled differently, by path."""
    escaped: list[str]
    """The paths of values in which `${` is now `\\${`, since hpc_det would take it for an interpolation."""


def imported(written: Tree, named: str) -> Imported:
    """Return the experiment file for a configuration. Raises UsageError with every problem; `named`: its name in them.

    Importing the result again changes nothing, except that each `\\${` gets two more backslashes: in Determined, a
    backslash before `${` is text.
    """
    dropped: dict[str, str] = {}
    tree = deepcopy(written)
    _drop_from(tree, _USELESS.get, dropped)
    tree = in_todays_names(tree)
    reasons = without_effect(tree)
    defaults = [key for key in reasons if is_default(key, value_at(tree, *key.split(".")))]
    _drop_from(tree, reasons.get, dropped)
    _drop_masks(tree, dropped)
    _drop_default_images(tree, dropped)
    for key, known in _DEFAULTS.items():
        if value_at(tree, *key.split(".")) in known:
            _drop(tree, key)
    own = {key: tree.pop(key) for key in _OWN_KEYS if key in tree}
    plain = {**own, **_in_our_spelling(_validated(tree, named))}
    result = _escaped(plain, "")
    renamed = {key: "searcher.max_length" for key in _OLD_LENGTH if value_at(written, *key.split(".")) is not None}
    dropped = {key: why for key, why in dropped.items() if key not in defaults}
    lost = [key for key in _keys(written) if key not in set(_keys(result)) | dropped.keys() | renamed.keys()]
    escaped = [path for (path, value), (_, old) in zip(texts(result), texts(plain), strict=True) if value != old]
    return Imported(tree=result, dropped=dropped, defaults=lost, renamed=renamed, escaped=escaped)


def _validated(tree: Tree, named: str) -> Experiment:
    """Return the experiment. Raises UsageError."""
    problems: list[Problem] = list(text_problems(tree))
    problems += (problem for problem in cross_problems(tree, {}) if problem.path in _OLD_LENGTH)
    try:
        experiment = Experiment.model_validate(tree)
    except ValidationError as error:
        problems += schema_problems(Experiment, error)
    if problems:
        raise UsageError([f"{named}: {line}" for line in render(problems, lambda path: None)])
    return experiment


def _escaped(value: Any, path: str) -> Any:
    """Return the value in the spelling with which its text has no interpolations, whatever keys a template sets."""
    if isinstance(value, dict):
        return {key: _escaped(item, join(path, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item, f"{path}[{i}]") for i, item in enumerate(value)]
    return escaped(value, path, _KEYS.__contains__) if isinstance(value, str) else value


def _in_our_spelling(experiment: Experiment) -> Tree:
    """Return what differs from the defaults."""
    tree = experiment.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    tree["searcher"] = {"name": experiment.searcher.name, **tree["searcher"]}
    if policies := tree.get("log_policies"):
        tree["log_policies"] = [policy for policy in policies if policy not in LOG_POLICIES]
    if "hyperparameters" in tree:
        tree["hyperparameters"] = _plain_constants(tree["hyperparameters"])
    for key in _SEVERAL_DEVICES:
        _join_devices(tree.get("environment", {}), key)
    return {key: value for key, value in tree.items() if value not in ({}, [])}


def _plain_constants(spec: Any) -> Any:
    """Return hyperparameters with constants as plain values, and ranges without empty keys."""
    if not isinstance(spec, dict):
        return spec
    if "type" not in spec:
        return {key: _plain_constants(value) for key, value in spec.items()}
    if spec["type"] == "const" and "val" in spec and not isinstance(spec["val"], dict):
        return spec["val"]
    return {key: value for key, value in spec.items() if value is not None or key == "val"}


def _join_devices(environment: Tree, key: str) -> None:
    """Write a value that is the same for every device once, and leave an empty one out."""
    by_device = environment.get(key)
    if isinstance(by_device, dict):
        values = list(by_device.values())
        if len(values) == 3 and all(value == values[0] for value in values):
            environment[key] = values[0]
    if environment.get(key) in ({}, []):
        del environment[key]


def _drop_from(tree: Tree, reason: Callable[[str], str | None], dropped: dict[str, str]) -> None:
    for key in _keys(tree):
        if (why := reason(key)) is not None:
            dropped[key] = why
            _drop(tree, key)


def _drop(tree: Tree, path: str) -> None:
    *above, last = path.split(".")
    section = value_at(tree, *above) if above else tree
    if isinstance(section, dict):
        section.pop(last, None)


def _drop_masks(tree: Tree, dropped: dict[str, str]) -> None:
    """Drop the masks that Determined shows in place of secrets."""
    for path in [path for path, value in leaves(tree) if value == MASK and "[" not in path]:
        dropped[path] = _MASKED
        _drop(tree, path)
    variables = value_at(tree, "environment", "environment_variables")
    for found in variables.values() if isinstance(variables, dict) else [variables]:
        if isinstance(found, list) and all(isinstance(item, str) and "=" in item for item in found):
            masked = masked_names(found)
            dropped |= {f"environment.environment_variables: {name}": _MASKED for name in masked}
            found[:] = [item for item in found if item.partition("=")[0] not in masked]


def _drop_default_images(tree: Tree, dropped: dict[str, str]) -> None:
    image = value_at(tree, "environment", "image")
    images = list(image.values()) if isinstance(image, dict) else [image]
    if any(images) and all(each is None or (isinstance(each, str) and is_default_image(each)) for each in images):
        dropped["environment.image"] = _IMAGE
        _drop(tree, "environment.image")


def _keys(tree: Tree) -> Iterator[str]:
    """Yield the path of each key with a value; those of sections with free keys, lists and lengths as a whole."""
    known: dict[str, None] = {}
    for path, value in leaves(tree):
        key = path.partition("[")[0]
        whole = next((key for key in _WHOLE if re.match(rf"{re.escape(key)}\b", path)), None)
        if value is not None:
            known[whole or key] = None
    yield from known


_WHOLE = (
    *FREE_FORM,
    *(f"environment.{key}" for key in (*_SEVERAL_DEVICES, "registry_auth", "pod_spec", "ports")),
    *("min_validation_period", "min_checkpoint_period", "searcher.max_length"),
    *("integrations", "security", "internal", "data_layer", "tensorboard_storage"),
)
"""Keys whose values are maps, not sections."""
