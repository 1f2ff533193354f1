"""The merge of the layers of a configuration into one tree, with the layer that wrote each value.

Of two layers, called template (lower) and config (higher): a scalar is the config's; maps merge key by key; a list is
the template's elements, then the config's. A null or absent key of the config keeps the template's value. If the types
differ, the config's value is used. `RULES` contains every exception, by path.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeAlias

Tree: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Merged:
    """The merged tree, and the name of the layer of each leaf, keyed by the paths of `leaves`."""

    tree: Tree
    origins: dict[str, str]


@dataclass(frozen=True)
class Leaf:
    """A value that is merged as a whole, and the name of the layer that wrote it."""

    value: Any
    layer: str


MarkedTree: TypeAlias = "dict[str, MarkedTree] | list[Leaf] | Leaf"
"""A tree of the configuration whose values are wrapped in Leaf."""
Rule: TypeAlias = Callable[[MarkedTree, MarkedTree, str], MarkedTree]
"""A function (template, config, path) -> merged."""


def merge(template: Tree, config: Tree) -> Tree:
    """Return `config` merged over `template`; the result shares no objects with either."""
    return merge_layers([("template", template), ("config", config)]).tree


def merge_layers(layers: Sequence[tuple[str, Tree]]) -> Merged:
    """Return the merge of (name, tree) pairs, lowest layer first."""
    merged: MarkedTree = {}
    for name, tree in layers:
        merged = _by_kind(merged, _mark(tree, name), "")
    tree = _plain(merged)
    return Merged(tree, {**_empty(tree, layers), **{path: leaf.layer for path, leaf in _marked_leaves(merged, "")}})


def _empty(tree: Tree, layers: Sequence[tuple[str, Tree]]) -> dict[str, str]:
    """Return the highest layer that wrote each empty map or list of the result, by path."""
    # An empty map or list contains no Leaf that could name its layer.
    result = {path for path, value in leaves(tree) if value in ({}, [])}
    return {path: name for name, layer in layers for path, value in leaves(layer) if path in result}


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every (path, value) that is a scalar, an element of a list, or an empty map or list."""
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from leaves(value, join(path, key))
    elif isinstance(tree, list) and tree:
        yield from ((f"{path}[{i}]", value) for i, value in enumerate(tree))
    elif path:
        yield path, tree


def value_at(tree: Any, *keys: str) -> Any:
    """Return the value below these keys, or None."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def join(path: str, key: object) -> str:
    """Return the dotted path of `key` below `path`."""
    return f"{path}.{key}" if path else str(key)


def _mark(value: Any, layer: str) -> MarkedTree:
    """Wrap scalars and elements of lists into Leaf; an element of a list is never merged with another."""
    if isinstance(value, dict):
        return {key: _mark(child, layer) for key, child in value.items()}
    if isinstance(value, list):
        return [Leaf(element, layer) for element in value]
    return Leaf(value, layer)


def _plain(node: MarkedTree) -> Any:
    if isinstance(node, dict):
        return {key: _plain(child) for key, child in node.items()}
    if isinstance(node, list):
        return [deepcopy(leaf.value) for leaf in node]
    return deepcopy(node.value)


def _marked_leaves(node: MarkedTree, path: str) -> Iterator[tuple[str, Leaf]]:
    if isinstance(node, dict):
        for key, child in node.items():
            yield from _marked_leaves(child, join(path, key))
    elif isinstance(node, list):
        yield from ((f"{path}[{i}]", leaf) for i, leaf in enumerate(node))
    else:
        yield path, node


def _merge(template: MarkedTree, config: MarkedTree, path: str) -> MarkedTree:
    if _is_null(config):
        return template
    if _is_null(template):
        return config
    return RULES.get(path, _by_kind)(template, config, path)


def _is_null(node: MarkedTree) -> bool:
    return isinstance(node, Leaf) and node.value is None


def _by_kind(template: MarkedTree, config: MarkedTree, path: str) -> MarkedTree:
    if isinstance(template, dict) and isinstance(config, dict):
        shared = {key: _merge(template[key], config[key], join(path, key)) for key in template if key in config}
        return {**template, **config, **shared}
    if isinstance(template, list) and isinstance(config, list):
        return template + config
    return config


def _atomic(_template: MarkedTree, config: MarkedTree, _path: str) -> MarkedTree:
    """Return the config's value: the key holds one value, even if it is written as a list or a map."""
    return config


def _hyperparameters(template: MarkedTree, config: MarkedTree, _path: str) -> MarkedTree:
    """Merge nested maps key by key, each hyperparameter as a whole."""
    # Unlike elsewhere, null is a value of a hyperparameter, so a null of the config replaces the template's value.
    if not (isinstance(template, dict) and isinstance(config, dict)):
        return config
    shared = {key: _hyperparameter(template[key], config[key]) for key in template if key in config}
    return {**template, **config, **shared}


def _hyperparameter(template: MarkedTree, config: MarkedTree) -> MarkedTree:
    nested = all(isinstance(node, dict) and "type" not in node for node in (template, config))
    return _hyperparameters(template, config, "") if nested else config


def _union(kind_key: str, common: frozenset[str]) -> Rule:
    """Return the rule for a map whose keys, except `common`, belong to the kind that `kind_key` names.

    If template and config name different kinds, only the `common` keys of the template are merged.
    """

    def rule(template: MarkedTree, config: MarkedTree, path: str) -> MarkedTree:
        if isinstance(template, dict) and isinstance(config, dict):
            kinds = {node.value for node in (template.get(kind_key), config.get(kind_key)) if isinstance(node, Leaf)}
            if len(kinds - {None}) > 1:
                template = {key: value for key, value in template.items() if key in common}
        return _by_kind(template, config, path)

    return rule


def _keyed(key: Callable[[Any], object], expand: Callable[[Leaf], Leaf] = lambda leaf: leaf) -> Rule:
    """Return the rule for a list in which an element replaces the template's element with the same `key`.

    The result is the config's elements, then the template's others. `expand` is applied to every element first.
    """

    def rule(template: MarkedTree, config: MarkedTree, _path: str) -> MarkedTree:
        if not (isinstance(template, list) and isinstance(config, list)):
            return config
        first = [expand(leaf) for leaf in config]
        taken = [key(leaf.value) for leaf in first]
        return first + [leaf for leaf in map(expand, template) if key(leaf.value) not in taken]

    return rule


def _field(name: str) -> Callable[[Any], object]:
    # An element without the field is its own key, so it is kept, and the schema reports it.
    return lambda element: element.get(name, element) if isinstance(element, dict) else element


def same_folder(path: str) -> str:
    """Return the path without what does not matter: `/a`, `/a/` and `/./a` are one folder."""
    return posixpath.normpath(path.strip()).replace("//", "/")


def _container_path(element: Any) -> object:
    """Return the key of a mount or device: its path in the container."""
    path = _field("container_path")(element)
    return same_folder(path) if isinstance(path, str) else path


def _only_key(element: Any) -> object:
    """Return the key of a logger: its kind, the only key of the element that has a value."""
    kinds = [kind for kind, value in element.items() if value is not None] if isinstance(element, dict) else []
    return kinds[0] if len(kinds) == 1 else element


def _policy(element: Any) -> object:
    """Return the key of a log policy: its name, or the action and pattern of one without a name."""
    if not isinstance(element, dict):
        return element
    return element.get("name") or (element.get("action"), element.get("pattern"))


def device_of_text(text: str) -> Tree | str:
    """Return the map for "host_path:container_path[:mode]", or any other string unchanged."""
    parts = text.split(":")
    if len(parts) not in (2, 3):
        return text
    return dict(zip(("host_path", "container_path", "mode"), parts, strict=False))


def _expand_device(leaf: Leaf) -> Leaf:
    return Leaf(device_of_text(leaf.value), leaf.layer) if isinstance(leaf.value, str) else leaf


def _set_union(template: MarkedTree, config: MarkedTree, _path: str) -> MarkedTree:
    """Return the template's elements, then the config's, each value once."""
    if not (isinstance(template, list) and isinstance(config, list)):
        return config
    distinct: list[Leaf] = []
    for leaf in template + config:
        if leaf.value not in [seen.value for seen in distinct]:
            distinct.append(leaf)
    return distinct


def _per_device(template: MarkedTree, config: MarkedTree, path: str) -> MarkedTree:
    """Merge values that may be maps by device; a value without a device applies to all devices."""
    if isinstance(template, dict) is not isinstance(config, dict):
        template, config = _for_every_device(template), _for_every_device(config)
    return _by_kind(template, config, path)


def _for_every_device(node: MarkedTree) -> MarkedTree:
    return node if isinstance(node, dict) else dict.fromkeys(("cpu", "cuda", "rocm"), node)


_SEARCHER_COMMON = frozenset({"metric", "smaller_is_better", "source_trial_id", "source_checkpoint_uuid"})
_STORAGE_COMMON = frozenset({"save_experiment_best", "save_trial_best", "save_trial_latest"})

_AZURE_ACCESS = frozenset({"connection_string", "account_url", "credential"})
_storage_union = _union("type", _STORAGE_COMMON)


def _storage(template: MarkedTree, config: MarkedTree, path: str) -> MarkedTree:
    """Merge as a union; the keys for access to an Azure account are replaced together."""
    if isinstance(template, dict) and isinstance(config, dict):
        # A connection_string of the template beside an account_url of the config would be a contradiction.
        given = {key for key in _AZURE_ACCESS & config.keys() if not _is_null(config[key])}
        template = {key: value for key, value in template.items() if not (given and key in _AZURE_ACCESS)}
    return _storage_union(template, config, path)


RULES: dict[str, Rule] = {
    "bind_mounts": _keyed(_container_path),
    "checkpoint_storage": _storage,
    "entrypoint": _atomic,
    "environment.environment_variables": _per_device,
    "environment.image": _per_device,
    "environment.proxy_ports": _keyed(_field("proxy_port")),
    "environment.registry_auth": _atomic,
    "hyperparameters": _hyperparameters,
    "labels": _set_union,
    "log_policies": _keyed(_policy),
    "loggers": _keyed(_only_key),
    "min_checkpoint_period": _atomic,
    "min_validation_period": _atomic,
    "resources.devices": _keyed(_container_path, _expand_device),
    "searcher": _union("name", _SEARCHER_COMMON),
    "searcher.bracket_rungs": _atomic,
    "searcher.max_length": _atomic,
    "searcher.points": _atomic,
    "tensorboard_storage": _union("type", frozenset()),
}
