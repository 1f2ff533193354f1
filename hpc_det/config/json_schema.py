"""The JSON Schema (2020-12) of experiment files and cluster profiles, for editors.

A file is one of several layers, and another layer may set the required keys. So no key is required here, and any key
may be null, which means unset.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hpc_det.config.checks import KINDS
from hpc_det.config.cluster import Cluster
from hpc_det.config.determined_keys import NO_EFFECT, in_words
from hpc_det.config.merge import Tree
from hpc_det.config.schema import Experiment
from hpc_det.config.section import Section, sections_at

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def experiment_schema() -> Tree:
    """Return the schema of an experiment file, which is also that of a template."""
    schema = _of_layer(Experiment, "An experiment of hpc_det")
    schema["properties"]["context_dir"] = {
        "type": ["string", "null"],
        "description": "Folder of the trial's code; null: the current directory.",
    }
    for path in NO_EFFECT:
        _add_words(schema, path)
    for key in Experiment.known_keys():
        if kinds := next((section.kinds for section in sections_at(Experiment, (key,)) if section.kinds), None):
            _tell_kinds(schema, key, kinds)
    _tell_hyperparameters(schema)
    for key in ("image", "environment_variables"):
        _also_the_old_gpu(schema["$defs"]["Environment"]["properties"][key])
    return schema


def cluster_schema() -> Tree:
    """Return the schema of a cluster profile, with the site's defaults for every experiment."""
    schema = _of_layer(Cluster, "A cluster of hpc_det")
    schema["properties"]["experiment"] = {
        "type": ["object", "null"],
        "description": "The site's defaults for every experiment; templates and experiment files override them.",
    }
    return schema


def _of_layer(model: type[Section], title: str) -> Tree:
    schema = model.model_json_schema(by_alias=True)
    for section in (schema, *schema.get("$defs", {}).values()):
        del section["title"]  # the name of the Python class, which editors would show
        section.pop("required", None)
        section["properties"] = {key: _or_null(value) for key, value in section["properties"].items()}
    return {"$schema": _DIALECT, **schema, "title": title}


def _or_null(schema: Tree) -> Tree:
    """Return the schema of a key's value, or null."""
    # anyOf and not oneOf: since no key is required, one map may fit the schemas of several kinds.
    about = {key: schema[key] for key in ("description", "default") if isinstance(schema.get(key), str | int | float)}
    rest = {key: value for key, value in schema.items() if key not in ("description", "default", "title")}
    return {**about, "anyOf": [*_choices(rest), {"type": "null"}]}


def _choices(schema: Tree) -> Iterator[Tree]:
    inner: list[Tree] | None = schema.get("anyOf") or schema.get("oneOf")
    if inner:
        for choice in inner:
            yield from _choices(choice)
    elif schema != {"type": "null"}:
        yield schema


def _tell_kinds(schema: Tree, key: str, kinds: Mapping[str, type[Section]]) -> None:
    """Replace the alternatives of `key` by a choice on the key that names the kind."""
    # With anyOf an editor reports only that no kind fits; with if/then it marks the wrong key.
    (kind_key,) = {kind.kind_key for kind in kinds.values()}
    named = {name: kind.__name__ for name, kind in kinds.items() if name}
    properties = [schema["$defs"][kind.__name__]["properties"] for kind in kinds.values()]
    about = {word: text for word, text in schema["properties"][key].items() if word != "anyOf"}
    schema["properties"][key] = {
        **about,
        "type": ["object", "null"],
        "properties": {kind_key: {"enum": [*named, None]}},
        "allOf": [
            *(_where(kind_key, name, {"$ref": f"#/$defs/{section}"}) for name, section in named.items()),
            {"if": {"properties": {kind_key: {"type": "null"}}}, "then": _of_any(properties)},
        ],
    }


def _where(kind_key: str, name: str, then: Tree) -> Tree:
    is_named = {"type": "object", "properties": {kind_key: {"const": name}}, "required": [kind_key]}
    return {"if": is_named, "then": then}


def _of_any(kinds: Sequence[Tree]) -> Tree:
    """Return a schema with the keys of all kinds, for a section without a name, which another layer may add."""
    found: dict[str, list[Tree]] = {}
    for key, value in (item for properties in kinds for item in properties.items()):
        same = found.setdefault(key, [])
        if value not in same:
            same.append(value)
    properties = {key: {"anyOf": values} for key, values in found.items()}
    return {"properties": properties, "additionalProperties": False}


_NUMBER, _INTEGER = {"type": "number"}, {"type": "integer"}
_OF_HYPERPARAMETERS: Tree = {
    "minval": _NUMBER,
    "maxval": _NUMBER,
    "base": {"type": ["number", "null"], "exclusiveMinimum": 0},
    "val": True,
    "vals": {"type": "array", "minItems": 1},
    "count": {"type": ["integer", "null"], "minimum": 1},
}


def _tell_hyperparameters(schema: Tree) -> None:
    """Describe hyperparameters: a map with a `type` is a range or a constant, any other map is nested."""
    nested = {"additionalProperties": {"$ref": "#/$defs/Hyperparameter"}}
    kinds = [_where("type", name, _hyperparameter(name, kind.keys)) for name, kind in KINDS.items()]
    schema["$defs"]["Hyperparameter"] = {
        "if": {"type": "object", "required": ["type"]},
        "then": {"properties": {"type": {"enum": [*KINDS]}}, "allOf": kinds},
        "else": nested,
    }
    section = schema["properties"]["hyperparameters"]
    del section["anyOf"]
    section |= {"type": ["object", "null"], **nested}


def _hyperparameter(name: str, keys: Sequence[str]) -> Tree:
    values = {**_OF_HYPERPARAMETERS, **({"minval": _INTEGER, "maxval": _INTEGER} if name == "int" else {})}
    properties = {key: values.get(key, True) for key in keys}
    return {"properties": properties, "additionalProperties": False}


def _add_words(schema: Tree, path: str) -> None:
    *above, key = path.split(".")
    for section in sections_at(Experiment, above):
        found = schema if section is Experiment else schema["$defs"][section.__name__]
        if key in found["properties"]:
            found["properties"][key]["description"] += in_words(path)


def _also_the_old_gpu(schema: Tree) -> None:
    """Accept `gpu`, the older name of the device `cuda`."""
    (by_device,) = (choice for choice in schema["anyOf"] if "propertyNames" in choice)
    by_device["propertyNames"]["enum"].append("gpu")
