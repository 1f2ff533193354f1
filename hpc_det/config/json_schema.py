"""The schema of an experiment file for editors (JSON Schema 2020-12).

A file is one layer of several: what it must not lack, a template or the cluster's profile may give. So nothing is
required here, and null is unset.
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
    """Of an experiment file, and of a template."""
    schema = _of_layer(Experiment, "An experiment of hpc_det")
    schema["properties"]["context_dir"] = {
        "type": ["string", "null"],
        "description": "The folder of the trial's code; by default the current one.",
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
    """Of a cluster's profile, with the site's defaults for every experiment."""
    schema = _of_layer(Cluster, "A cluster of hpc_det")
    schema["properties"]["experiment"] = {
        "type": ["object", "null"],
        "description": "The site's defaults for every experiment, below templates and experiment files.",
    }
    return schema


def _of_layer(model: type[Section], title: str) -> Tree:
    schema = model.model_json_schema(by_alias=True)
    for section in (schema, *schema.get("$defs", {}).values()):
        del section["title"]
        section.pop("required", None)
        section["properties"] = {key: _or_null(value) for key, value in section["properties"].items()}
    return {"$schema": _DIALECT, **schema, "title": title}


def _or_null(schema: Tree) -> Tree:
    """What a key of a section may be. Several kinds may fit one section where none of its keys is required."""
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
    """A choice by name, so that an editor shows the wrong key and not just that no kind fits."""
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
    """Without a name the keys of all kinds: another layer may name it."""
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
    """A map with a type is a range or constant, any other one nested."""
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
    (by_device,) = (choice for choice in schema["anyOf"] if "propertyNames" in choice)
    by_device["propertyNames"]["enum"].append("gpu")
