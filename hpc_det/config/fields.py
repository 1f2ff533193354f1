"""The kinds of values that a configuration holds, and what every section of it has in common.

Each field's description completes "expected ..." in an error message. Null means unset.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, cast, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    PlainSerializer,
    PlainValidator,
    Tag,
    model_validator,
)

from hpc_det.config.managed_flags import refuse_managed_flags
from hpc_det.config.merge import Tree

Unit: TypeAlias = Literal["batches", "records", "epochs"]


@dataclass(frozen=True)
class Length:
    """An amount of training."""

    amount: int
    unit: Unit = "batches"


def _length(value: object) -> Length:
    if isinstance(value, Length):
        return value
    if not isinstance(value, dict):
        value = {"batches": value}
    ((unit, amount),) = value.items()
    if unit not in get_args(Unit) or type(amount) is not int or amount < 0:
        raise ValueError
    return Length(amount, cast(Unit, unit))


def _positive_length(value: object) -> Length:
    length = _length(value)
    if length.amount == 0:
        raise ValueError
    return length


def time_limit_min(value: str | int) -> int:
    """Minutes of "HH:MM:SS", "D-HH:MM:SS" or plain minutes, rounded up; ValueError for anything else and for zero."""
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
    return -(-seconds // 60)


def _time_limit(value: str | int) -> str:
    time_limit_min(value)
    return str(value)


def _entrypoint(value: object) -> str | list[str]:
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list) and value and value[0] and all(isinstance(word, str) for word in value):
        return value
    raise ValueError


def _sbatch_args(arguments: list[str]) -> list[str]:
    refuse_managed_flags(arguments)
    return arguments


_LENGTH = "one of batches, records, epochs with a whole number >= {}, such as {{batches: 100}} or 100"
_AsMap = PlainSerializer(lambda length: {length.unit: length.amount}, return_type=dict[str, int])
Period: TypeAlias = Annotated[Length, PlainValidator(_length), _AsMap, Field(description=_LENGTH.format(0))]
MaxLength: TypeAlias = Annotated[Length, PlainValidator(_positive_length), _AsMap, Field(description=_LENGTH.format(1))]
TimeLimit: TypeAlias = Annotated[
    str | None,
    PlainValidator(_time_limit),
    Field(description="HH:MM:SS, D-HH:MM:SS or whole minutes, more than zero"),
]
Entrypoint: TypeAlias = Annotated[
    str | list[str],
    PlainValidator(_entrypoint),
    Field(description="a command such as `python3 -m hpc_det.launch.torch_distributed --trial model_def:MyTrial`"),
]
Positive: TypeAlias = Annotated[int, Field(ge=1, description="a whole number >= 1")]
NotNegative: TypeAlias = Annotated[int, Field(ge=0, description="a whole number >= 0")]
Flag: TypeAlias = Annotated[bool, Field(description="true or false")]
Text: TypeAlias = Annotated[str, Field(min_length=1, pattern=r"\S", description="a text that is not empty")]
OptionalText: TypeAlias = Annotated[
    str | None, Field(min_length=1, pattern=r"\S", description="a text that is not empty")
]
Texts: TypeAlias = Annotated[list[str], Field(description="a list of texts")]
FreeMap: TypeAlias = Annotated[Tree, Field(description="a map")]
SbatchArgs: TypeAlias = Annotated[Texts, AfterValidator(_sbatch_args)]

# Tags in angle brackets are no part of a value's path.
Variable: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*=")]
Variables: TypeAlias = Annotated[list[Variable], Field(description="a list of NAME=value")]
DeviceVariables: TypeAlias = Annotated[
    Annotated[list[Variable], Tag("<list>")]
    | Annotated[dict[Literal["cpu", "cuda", "rocm"], list[Variable]], Tag("<map>")],
    Discriminator(lambda value: "<map>" if isinstance(value, dict) else "<list>"),
    Field(description="a list of NAME=value, or such a list for each of cpu, cuda, rocm"),
]


class Section(BaseModel):
    """Every section: unknown keys are errors, nothing is coerced, nothing changes later."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_unset(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if value is not None or key not in cls.model_fields}


def keys_at(model: type[BaseModel], path: tuple[str, ...]) -> list[str] | None:
    """The keys that the section at `path` may have; None if it is no section."""
    for key in path:
        field = model.model_fields.get(key)
        if field is None or not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            return None
        model = field.annotation
    return list(model.model_fields)


def expectation(model: type[BaseModel], path: tuple[str, ...]) -> str:
    """What may stand at `path`, in the words of the nearest field that is described."""
    keys = keys_at(model, path)
    if keys is not None:
        return f"a map with keys of {', '.join(keys)}"
    *parents, key = path
    if keys_at(model, tuple(parents)) is None:
        return expectation(model, tuple(parents))
    for parent in parents:
        model = cast(type[BaseModel], model.model_fields[parent].annotation)
    return model.model_fields[key].description or "another value"
