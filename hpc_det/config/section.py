"""What every section of a configuration has in common, and sections of several kinds, such as searchers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, get_args

from pydantic import BaseModel, ConfigDict, model_validator


class Section(BaseModel):
    """Every section: unknown keys are errors, nothing is coerced, nothing changes later."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    kind_key: ClassVar[str] = ""
    """Of a section that is one of several kinds: the key that says which; `kinds` then are all of them by name."""
    kinds: ClassVar[dict[str, type[Section]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _null_is_unset(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = {key for kind in (cls, *cls.kinds.values()) for key in kind.known_keys()}
        return {key: value for key, value in data.items() if value is not None or key not in known}

    @classmethod
    def known_keys(cls) -> list[str]:
        """As a file spells them."""
        return [field.alias or name for name, field in cls.model_fields.items()]


def kind_discriminator(default: str, *members: type[Section]) -> Callable[[Any], str]:
    """Make the members the kinds of one section; what is returned tells a value's tag, by `default` that one."""
    kinds = {_kind(member): member for member in members}
    for member in members:
        member.kinds = kinds

    def tag(value: Any) -> str:
        kind = value.get(members[0].kind_key) if isinstance(value, dict) else getattr(value, members[0].kind_key, None)
        return f"<{default if kind is None else kind}>"

    return tag


def _kind(member: type[Section]) -> str:
    """The one value that the member's kind_key may have; nothing where it has none."""
    (value,) = get_args(member.model_fields[member.kind_key].annotation) or ("",)
    return str(value)
