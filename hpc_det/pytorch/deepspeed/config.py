"""A DeepSpeed configuration, overridden by values of an experiment."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from numbers import Number
from pathlib import Path
from typing import Any

import hjson  # DeepSpeed's own reader of config files, which comes with it

from hpc_det.config.plain_containers import plain_containers
from hpc_det.errors import UsageError, shown

Config = dict[str, Any]

AUTO = "auto"
_READ_AS_THEY_ARE = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "steps_per_print",
    "optimizer",
    "scheduler",
)
"""Keys whose value "auto" DeepSpeed uses in computations, which fail.

For all other keys with "auto" it uses their defaults (measured with 0.19.8).
"""


class DeepSpeedConfigTypeError(UsageError, TypeError):
    """A value of the wrong type; also a TypeError, as in Determined."""


def overwrite_deepspeed_config(base_ds_config: str | Path | Config, source_ds_dict: Mapping[str, Any]) -> Config:
    """Return a copy of the configuration, overridden by the leaves of `source_ds_dict`.

    `base_ds_config` is a dict or the path of a JSON file, which may have comments, as DeepSpeed allows. Sections, which
    are dicts in both, are merged recursively; a leaf of the base is replaced, even by a section; new keys are added.
    Dots in keys have no meaning. The result consists of plain dicts and lists, whatever their classes were.

    Raises DeepSpeedConfigTypeError for a leaf that would replace a section or a value of another type; UsageError for a
    file that is missing, not valid JSON or has a key twice, and for a remaining "auto", which only Transformers
    resolves.
    """
    base = _of_file(Path(base_ds_config)) if isinstance(base_ds_config, (str, Path)) else base_ds_config
    for name, given in (("base_ds_config", base), ("source_ds_dict", source_ds_dict)):
        if not isinstance(given, Mapping):
            raise DeepSpeedConfigTypeError(f"overwrite_deepspeed_config: {name} is {shown(given)}; expected a dict")
    problems: list[str] = []
    merged = _merged(plain_containers(base), plain_containers(source_ds_dict), (), problems)
    if problems:
        raise DeepSpeedConfigTypeError(problems)
    if unresolved := [path for key in _READ_AS_THEY_ARE for path in _autos(merged.get(key), key)]:
        raise UsageError(
            [f"deepspeed config: {path}: only Transformers resolves {AUTO!r}; give a value" for path in unresolved]
        )
    return merged


def get_ds_config_from_hparams(hparams: Mapping[str, Any], base_dir: str | Path = "") -> Config:
    """Return the file that hyperparameters.deepspeed_config names, overridden by
    hyperparameters.overwrite_deepspeed_args.

    Relative paths are below `base_dir`. Raises the errors of `overwrite_deepspeed_config`, and UsageError if
    `deepspeed_config` is missing or not a path.
    """
    name = hparams.get("deepspeed_config")
    if not isinstance(name, (str, Path)):
        what = shown(name) if "deepspeed_config" in hparams else "missing"
        raise UsageError(
            f"hyperparameters.deepspeed_config: {what}; give the path of a deepspeed config, such as ds_config.json"
        )
    overwrites = hparams.get("overwrite_deepspeed_args") or {}
    if not isinstance(overwrites, Mapping):
        raise DeepSpeedConfigTypeError(
            f"hyperparameters.overwrite_deepspeed_args: {shown(overwrites)}; give a map of keys of {name}"
        )
    return overwrite_deepspeed_config(Path(base_dir) / name, overwrites)


# --- file


def _of_file(path: Path) -> Config:
    duplicates: list[str] = []

    def section(pairs: list[tuple[str, Any]]) -> Config:
        duplicates.extend(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        return dict(pairs)

    try:
        content = hjson.loads(path.read_text(), object_pairs_hook=section)
    except OSError as error:
        raise UsageError(
            f"deepspeed config {path}: {error.strerror} in {Path.cwd()}; put it beside the code of the trial, or give "
            f"an absolute path"
        ) from None
    except ValueError as error:
        raise UsageError(f"deepspeed config {path}: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"deepspeed config {path}: {shown(content)}; expected a JSON object, {{...}}")
    if duplicates:
        raise UsageError(f"deepspeed config {path}: more than one {', '.join(map(repr, duplicates))}; keep one of each")
    return content


# --- merge


def _merged(base: Mapping[str, Any], source: Mapping[str, Any], above: tuple[str, ...], problems: list[str]) -> Config:
    merged = {**base}
    for key, value in source.items():
        path = ".".join((*above, str(key)))
        if isinstance(base.get(key), Mapping) and isinstance(value, Mapping):
            merged[key] = _merged(base[key], value, (*above, str(key)), problems)
            continue
        if key in base:
            problems += _misfit(path, base[key], value)
        else:
            _mention_dots(str(key), base)
        merged[key] = value
    return merged


def _misfit(path: str, old: Any, new: Any) -> Iterator[str]:
    """Yield the problem if `new` cannot replace `old`. None is compatible with any type."""
    if isinstance(old, Mapping):
        yield f"deepspeed config: {path}: {shown(new)} would replace the section {shown(dict(old))}; give keys of it"
        return
    if isinstance(new, Mapping) or None in (old, new) or AUTO in (old, new) or _kind(old) == _kind(new):
        return
    hint = "; YAML reads 1e-3 as text: write 1.0e-3" if (_kind(old), _kind(new)) == ("number", "text") else ""
    yield (
        f"deepspeed config: {path}: {shown(new)} is {_kind(new)}, and {shown(old)}, which it would replace, "
        f"{_kind(old)}{hint}"
    )


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, Number):
        return "number"
    if isinstance(value, (list, tuple)):
        return "list"
    return "text" if isinstance(value, str) else type(value).__name__


def _mention_dots(key: str, base: Mapping[str, Any]) -> None:
    section, dot, below = key.partition(".")
    if dot and isinstance(base.get(section), Mapping):
        warnings.warn(
            f"overwrite_deepspeed_config: {key!r} is a new key with a dot in it, and does not change the section "
            f"{section!r}; to change the section, nest {below!r} in {section!r}",
            stacklevel=4,
        )


def _autos(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, below in value.items():
            yield from _autos(below, f"{path}.{key}")
    elif isinstance(value, str) and value == AUTO:
        yield path
