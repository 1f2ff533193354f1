"""The schema of an experiment file for editors (JSON Schema 2020-12).

A file is one layer of several: what it must not lack, a template or the cluster's profile may give. So nothing is
required here, and null is unset.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpc_det.config.cluster import Cluster
from hpc_det.config.determineds_keys import NO_EFFECT, in_words
from hpc_det.config.keys import sections_at
from hpc_det.config.merge import Tree
from hpc_det.config.schema import Experiment
from hpc_det.config.section import Section

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


def _add_words(schema: Tree, path: str) -> None:
    *above, key = path.split(".")
    for section in sections_at(Experiment, above):
        found = schema if section is Experiment else schema["$defs"][section.__name__]
        if key in found["properties"]:
            found["properties"][key]["description"] += in_words(path)


def _also_the_old_gpu(schema: Tree) -> None:
    (by_device,) = (choice for choice in schema["anyOf"] if "propertyNames" in choice)
    by_device["propertyNames"]["enum"].append("gpu")
