"""What every section of a configuration has in common, sections of several kinds, such as searchers, and what may stand
at a path of a schema: its keys, and what a value there should be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal, TypeAlias, get_args, get_origin

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic.fields import FieldInfo

from hpc_det.config.fields import Expected


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


# --- what may stand at a path

Where: TypeAlias = "Sequence[str | int]"
"""A path in parts: keys, indices, and pydantic's tags in angle brackets, which say the kind of a section."""


def keys_at(model: type[Section], where: Where) -> list[str] | None:
    """The keys that the section at `where` may have, of any kind if no tag says which; None if it is no section."""
    sections = sections_at(model, where)
    return list(dict.fromkeys(key for section in sections for key in section.known_keys())) if sections else None


def sections_at(model: type[Section], where: Where) -> list[type[Section]]:
    """The sections that may stand at `where`: none, one, or one for each kind."""
    found, names_follow = [model], False
    for part in where:
        if names_follow:  # a map of sections by names of the user's
            names_follow = False
        elif is_tag(part):
            found = [section for section in found if section.kinds.get(str(part)[1:-1], section) is section]
        elif isinstance(part, str):
            annotations = [field.annotation for section in found if (field := field_at(section, part))]
            found = [inner for annotation in annotations for inner in sections_in(annotation)]
            names_follow = any(get_origin(annotation) is dict for annotation in annotations)
    return [] if names_follow else found


def is_tag(part: str | int) -> bool:
    return isinstance(part, str) and part.startswith("<")


def field_at(section: type[Section], key: str) -> FieldInfo | None:
    """The field that a file spells `key`."""
    return next((field for name, field in section.model_fields.items() if (field.alias or name) == key), None)


def sections_in(annotation: Any) -> Iterator[type[Section]]:
    """The sections that a type mentions, below unions, lists and maps."""
    if isinstance(annotation, type) and get_origin(annotation) is None:
        if issubclass(annotation, Section):
            yield annotation
    else:
        for inner in get_args(annotation):
            yield from sections_in(inner)


def expectation(model: type[Section], where: Where) -> str:
    """What may stand at `where`, in the words of the nearest field that says it."""
    for depth in range(len(where), 0, -1):
        *above, key = where[:depth]
        if isinstance(key, int):
            continue  # an element is told with its list
        fields = [field_at(section, key) for section in sections_at(model, above)]
        if words := next((words for field in fields if field and (words := expected(field))), None):
            return words
        if keys := keys_at(model, where[:depth]):
            return f"a map with keys of {', '.join(keys)}"
        if described := next((field.description for field in fields if field and field.description), None):
            return described
    return f"a map with keys of {', '.join(model.known_keys())}"


def expected(field: FieldInfo) -> str | None:
    """What completes "expected ..." for this field; None where only its keys can say it."""
    return next(_words([*reversed(field.metadata), field.annotation]), None)


def _words(found: Sequence[Any]) -> Iterator[str]:
    yield from (item.words for item in found if isinstance(item, Expected))
    for item in found:
        if get_origin(item) is Literal:
            *others, last = map(str, get_args(item))
            yield f"{', '.join(others)} or {last}" if others else last
        elif not isinstance(item, Expected) and get_args(item):
            yield from _words(get_args(item))
