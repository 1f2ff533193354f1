"""A deepspeed config, overwritten with what an experiment says."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from numbers import Number
from pathlib import Path
from typing import Any

import hjson  # DeepSpeed's own reader of config files, which comes with it

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
"""Keys where DeepSpeed computes with "auto" and dies; elsewhere it takes its default (measured with 0.19.8)."""


class DeepSpeedConfigTypeError(UsageError, TypeError):
    """A value of the wrong type, also for who catches TypeError."""


def overwrite_deepspeed_config(base_ds_config: str | Path | Config, source_ds_dict: Mapping[str, Any]) -> Config:
    """A new dict: `base_ds_config`, the path of a file or a dict, with the leaves of `source_ds_dict` over its own.

    Depth first: a section, which is a dict in both, is merged; a leaf of the base is replaced, also by a section; a key
    that the base does not have is added. Keys with dots are keys like others. The file is read as DeepSpeed reads it:
    JSON that may have comments.

    Raises DeepSpeedConfigTypeError for a leaf that would replace a section or one of another type; UsageError for a
    file that is missing, no JSON, or has a key twice, and for an "auto" that is left: a word of Transformers.
    """
    base = _of_file(Path(base_ds_config)) if isinstance(base_ds_config, (str, Path)) else base_ds_config
    for name, given in (("base_ds_config", base), ("source_ds_dict", source_ds_dict)):
        if not isinstance(given, Mapping):
            raise DeepSpeedConfigTypeError(f"overwrite_deepspeed_config: {name} is {shown(given)}; expected a dict")
    problems: list[str] = []
    merged = _merged(base, source_ds_dict, (), problems)
    if problems:
        raise DeepSpeedConfigTypeError(problems)
    if unresolved := [path for key in _READ_AS_THEY_ARE for path in _autos(merged.get(key), key)]:
        raise UsageError(
            [f"deepspeed config: {path}: {AUTO!r} is for Transformers alone; give a value" for path in unresolved]
        )
    return merged


def get_ds_config_from_hparams(hparams: Mapping[str, Any], base_dir: str | Path = "") -> Config:
    """The file that hyperparameters.deepspeed_config names, from `base_dir`, with
    hyperparameters.overwrite_deepspeed_args over it.

    Raises what `overwrite_deepspeed_config` raises, and UsageError where the first is missing or no path.
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
        raise UsageError(f"deepspeed config {path}: no JSON: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"deepspeed config {path}: {shown(content)}; expected a JSON object, {{...}}")
    if duplicates:
        raise UsageError(f"deepspeed config {path}: more than one {', '.join(map(repr, duplicates))}; keep one of each")
    return content


# --- merge


def _merged(base: Mapping[str, Any], source: Mapping[str, Any], above: tuple[str, ...], problems: list[str]) -> Config:
    merged = copy.deepcopy(dict(base))
    for key, value in source.items():
        path = ".".join((*above, str(key)))
        if isinstance(base.get(key), Mapping) and isinstance(value, Mapping):
            merged[key] = _merged(base[key], value, (*above, str(key)), problems)
            continue
        if key in base:
            problems += _misfit(path, base[key], value)
        else:
            _mention_dots(str(key), base)
        merged[key] = copy.deepcopy(value)
    return merged


def _misfit(path: str, old: Any, new: Any) -> Iterator[str]:
    """`new` is copied over a leaf, or a section that is no leaf. None stands for any type."""
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
            f"overwrite_deepspeed_config: {key!r} is a new key with a dot in it, and leaves the section {section!r} as "
            f"it is; to change that, nest {below!r} in {section!r}",
            stacklevel=4,
        )


def _autos(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, below in value.items():
            yield from _autos(below, f"{path}.{key}")
    elif isinstance(value, str) and value == AUTO:
        yield path
