"""The types of the values in a configuration.

`Expected` on a type contains the text after "expected" in error messages, and the description of a field contains its
meaning. Null means unset.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias, cast, get_args

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    PlainSerializer,
    PlainValidator,
    Tag,
    WithJsonSchema,
)

from hpc_det.config.managed_flags import refuse_managed_flags, refuse_managed_qsub_flags
from hpc_det.config.merge import Tree

Unit: TypeAlias = Literal["batches", "records", "epochs"]
Device: TypeAlias = Literal["cpu", "cuda", "rocm"]


@dataclass(frozen=True)
class Expected:
    """The values that are allowed, worded to follow "expected" in an error message."""

    words: str


@dataclass(frozen=True)
class Length:
    """An amount of training."""

    amount: int
    unit: Unit = "batches"


def _length(value: object) -> Length:
    """Return the Length that a map such as {epochs: 3}, or a number of batches, stands for. Raises ValueError."""
    if isinstance(value, Length):
        return value
    if not isinstance(value, dict):
        value = {"batches": value}
    ((unit, amount),) = value.items()  # ValueError unless the map has exactly one key
    if unit not in get_args(Unit) or type(amount) is not int or amount < 0:
        raise ValueError
    return Length(amount, cast(Unit, unit))


def _positive_length(value: object) -> Length:
    length = _length(value)
    if length.amount == 0:
        raise ValueError
    return length


def time_limit_min(value: str | int) -> int:
    """Return the minutes, rounded up, of "HH:MM:SS", "D-HH:MM:SS" or a number of minutes.

    Raises ValueError for anything else and for zero.
    """
    if type(value) is int or (isinstance(value, str) and re.fullmatch(r"[0-9]+", value)):
        seconds = int(value) * 60
    else:
        parts = re.fullmatch(r"(?:([0-9]+)-)?([0-9]+):([0-5][0-9]):([0-5][0-9])", str(value))
        if not parts:
            raise ValueError
        days, hours, minutes, rest = (int(part or 0) for part in parts.groups())
        seconds = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    if seconds <= 0:
        raise ValueError
    return -(-seconds // 60)  # rounded up


def _time_limit(value: str | int) -> str:
    time_limit_min(value)
    return str(value)


_SIZE = r"^([0-9]+|[0-9]*\.[0-9]+) ?(?:([KMGTPkmgtp])(?:[Ii]?[Bb])?|[Bb])?$"
"""The sizes that Determined accepts (its schemas/expconf/v0/resources.json)."""


def size_bytes(value: str | int) -> int:
    """Return the bytes of a number, or of a string such as "1.5 GiB" or "512m".

    As in Determined (go-units' RAMInBytes), K, M, G, T and P are powers of 1024 with and without the i. Raises
    ValueError for anything else and for zero.
    """
    if type(value) is int:
        size = value
    else:
        parts = re.fullmatch(_SIZE, str(value))
        if not parts or not isinstance(value, str):
            raise ValueError
        size = int(float(parts[1]) * 1024 ** "_KMGTP".index((parts[2] or "_").upper()))
    if size <= 0:
        raise ValueError
    return size


_TRIAL_NAME = r"^[1-9][0-9]*(/[1-9][0-9]*)?$"


def _trial_name(value: str | int) -> str:
    if not isinstance(value, bool) and re.fullmatch(_TRIAL_NAME, str(value)):
        return str(value)
    raise ValueError


def _entrypoint(value: object) -> str | list[str]:
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list) and value and value[0] and all(isinstance(word, str) for word in value):
        return value
    raise ValueError


def _sbatch_args(arguments: list[str]) -> list[str]:
    refuse_managed_flags(arguments)
    return arguments


def _pbsbatch_args(arguments: list[str]) -> list[str]:
    refuse_managed_qsub_flags(arguments)
    return arguments


def _regex(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(str(error)) from None
    return pattern


def _distinct(texts: list[str]) -> list[str]:
    if len(set(texts)) < len(texts):
        raise ValueError
    return texts


def _prefix(prefix: str | None) -> str | None:
    """Return a prefix of objects; raise ValueError if one of its parts is `..`, which no object store resolves."""
    if ".." in (prefix or "").split("/"):
        raise ValueError
    return prefix


_LENGTH = "one of batches, records, epochs with a whole number >= {}, such as {{batches: 100}} or 100"
_AsMap = PlainSerializer(lambda length: {length.unit: length.amount}, return_type=dict[str, int])


def _length_schema(minimum: int) -> WithJsonSchema:
    amount: Tree = {"type": "integer", "minimum": minimum}
    units = dict.fromkeys(get_args(Unit), amount)
    one = {"type": "object", "properties": units, "additionalProperties": False, "minProperties": 1, "maxProperties": 1}
    return WithJsonSchema({"anyOf": [amount, one]})


Period: TypeAlias = Annotated[Length, PlainValidator(_length), _AsMap, _length_schema(0), Expected(_LENGTH.format(0))]
MaxLength: TypeAlias = Annotated[
    Length, PlainValidator(_positive_length), _AsMap, _length_schema(1), Expected(_LENGTH.format(1))
]
TimeLimit: TypeAlias = Annotated[
    str | None,
    PlainValidator(_time_limit),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": r"^[0-9]+$|^([0-9]+-)?[0-9]+:"}]}
    ),
    Expected("HH:MM:SS, D-HH:MM:SS or whole minutes, more than zero"),
]
Size: TypeAlias = Annotated[
    int,
    PlainValidator(size_bytes),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": _SIZE}]}),
    Expected("a size in bytes, or a string such as '1.5 GiB'"),
]
Entrypoint: TypeAlias = Annotated[
    str | list[str],
    PlainValidator(_entrypoint),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "pattern": r"\S"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
            ]
        }
    ),
    Expected("a command such as `python3 -m hpc_det.launch.torch_distributed --trial model_def:MyTrial`"),
]
Positive: TypeAlias = Annotated[int, Field(ge=1), Expected("a whole number >= 1")]
NotNegative: TypeAlias = Annotated[int, Field(ge=0), Expected("a whole number >= 0")]
AboveZero: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False), Expected("a number above 0")]
Divisor: TypeAlias = Annotated[float, Field(gt=1, allow_inf_nan=False), Expected("a number above 1")]
Port: TypeAlias = Annotated[int, Field(ge=1, le=65535), Expected("a port from 1 to 65535")]
Flag: TypeAlias = Annotated[bool, Expected("true or false")]
Stage: TypeAlias = Annotated[Literal["image", "tar", "none"], Expected("image, tar or none")]
Text: TypeAlias = Annotated[str, Field(min_length=1, pattern=r"\S"), Expected("a non-empty string")]
Prefix: TypeAlias = Annotated[
    str | None,
    AfterValidator(_prefix),
    Field(min_length=1, pattern=r"\S"),
    Expected("a prefix without the part .., such as team/digits"),
]
OptionalText: TypeAlias = Annotated[str | None, Field(min_length=1, pattern=r"\S"), Expected("a non-empty string")]
AnyText: TypeAlias = Annotated[str, Expected("a string")]
AbsolutePath: TypeAlias = Annotated[str, Field(pattern=r"^/"), Expected("an absolute path")]
Regex: TypeAlias = Annotated[str, AfterValidator(_regex), Expected("a regular expression of Python's `re`")]
Texts: TypeAlias = Annotated[list[str], Expected("a list of strings")]
DistinctTexts: TypeAlias = Annotated[
    list[str],
    AfterValidator(_distinct),
    Field(json_schema_extra={"uniqueItems": True}),
    Expected("a list of distinct strings"),
]
PositiveList: TypeAlias = Annotated[list[Positive], Expected("a list of whole numbers >= 1")]
TrialName: TypeAlias = Annotated[
    str,
    PlainValidator(_trial_name),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": _TRIAL_NAME}]}),
    Expected("a trial as EXPERIMENT/TRIAL, such as '12/3', or the number of an experiment"),
]
ClassName: TypeAlias = Annotated[
    str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"), Expected("module:Class, such as my_search:MySearch")
]
Propagation: TypeAlias = Annotated[
    Literal["rprivate", "private", "rshared", "shared", "rslave", "slave"],
    Expected("rprivate, private, rshared, shared, rslave or slave"),
]
GpuType: TypeAlias = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9_.-]+$"), Expected("the scheduler's name of a GPU type, such as a100")
]
Memory: TypeAlias = Annotated[str, Field(pattern=r"^[1-9][0-9]*[KMGT]?$"), Expected("a size such as 16G")]
"""A size in Slurm's notation; without a unit it is in MiB."""
Constraint: TypeAlias = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9_.:/+&|*()\[\]=,-]+$"),
    Expected("a feature such as nvlink, or several such as 'nvlink&ib', without blanks"),
]
FreeMap: TypeAlias = Annotated[Tree, Expected("a map")]
SbatchArgs: TypeAlias = Annotated[Texts, AfterValidator(_sbatch_args)]
PbsbatchArgs: TypeAlias = Annotated[Texts, AfterValidator(_pbsbatch_args)]

# The angle brackets mark a tag: pydantic puts tags into the path of an error, and `is_tag` finds them there.
Variable: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*=")]
Variables: TypeAlias = Annotated[list[Variable], Expected("a list of NAME=value")]
_by_device = Discriminator(lambda value: "<map>" if isinstance(value, dict) else "<one>")
DeviceVariables: TypeAlias = Annotated[
    Annotated[list[Variable], Tag("<one>")] | Annotated[dict[Device, list[Variable]], Tag("<map>")],
    _by_device,
    Expected("a list of NAME=value, or such a list for each of cpu, cuda, rocm"),
]
DeviceText: TypeAlias = Annotated[
    Annotated[Text, Tag("<one>")] | Annotated[dict[Device, Text], Tag("<map>")],
    _by_device,
    Expected("a string, or one for each of cpu, cuda, rocm"),
]
