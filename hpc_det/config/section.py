"""The base of all sections of a configuration, sections of several kinds such as searchers, and look-ups in
a schema.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal, TypeAlias, get_args, get_origin

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic.fields import FieldInfo

from hpc_det.config.fields import Expected


class Section(BaseModel):
    """A section: unknown keys are errors, values are not converted, and instances are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    kind_key: ClassVar[str] = ""
    """Key that selects the kind of a section; `kinds` maps its values to all kinds. Empty for a section of one kind."""
    kinds: ClassVar[dict[str, type[Section]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _null_is_unset(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        # A null is removed also from a key that only another kind has, which is then no error. A null of an unknown key
        # stays, so that the key is reported.
        known = {key for kind in (cls, *cls.kinds.values()) for key in kind.known_keys()}
        return {key: value for key, value in data.items() if value is not None or key not in known}

    @classmethod
    def known_keys(cls) -> list[str]:
        """Return the keys as a file spells them."""
        return [field.alias or name for name, field in cls.model_fields.items()]


def kind_discriminator(default: str, *members: type[Section]) -> Callable[[Any], str]:
    """Register the members as kinds of one section, and return a function from a value to its tag, or `default`."""
    kinds = {_kind(member): member for member in members}
    for member in members:
        member.kinds = kinds

    def tag(value: Any) -> str:
        kind = value.get(members[0].kind_key) if isinstance(value, dict) else getattr(value, members[0].kind_key, None)
        return f"<{default if kind is None else kind}>"

    return tag


def _kind(member: type[Section]) -> str:
    """Return the only value of the member's kind_key; empty without one."""
    (value,) = get_args(member.model_fields[member.kind_key].annotation) or ("",)
    return str(value)


# --- the sections and fields at a path

Where: TypeAlias = "Sequence[str | int]"
"""Parts of a path: keys, indices, and pydantic's tags in angle brackets, which name the kind of a section."""


def keys_at(model: type[Section], where: Where) -> list[str] | None:
    """Return the keys of the section at `where`; those of all its kinds if no tag selects one; None for no section."""
    sections = sections_at(model, where)
    return list(dict.fromkeys(key for section in sections for key in section.known_keys())) if sections else None


def sections_at(model: type[Section], where: Where) -> list[type[Section]]:
    """Return the possible sections at `where`: none, one, or one for each kind."""
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
    """Return the field that a file spells `key`."""
    return next((field for name, field in section.model_fields.items() if (field.alias or name) == key), None)


def sections_in(annotation: Any) -> Iterator[type[Section]]:
    """Yield the sections in a type, inside unions, lists and maps."""
    if isinstance(annotation, type) and get_origin(annotation) is None:
        if issubclass(annotation, Section):
            yield annotation
    else:
        for inner in get_args(annotation):
            yield from sections_in(inner)


def expectation(model: type[Section], where: Where) -> str:
    """Return the expected value at `where`, from the nearest field that describes it."""
    for depth in range(len(where), 0, -1):
        *above, key = where[:depth]
        if isinstance(key, int):
            continue  # the expectation of a list describes its elements, too
        fields = [field_at(section, key) for section in sections_at(model, above)]
        if words := next((words for field in fields if field and (words := expected(field))), None):
            return words
        if keys := keys_at(model, where[:depth]):
            return f"a map with keys of {', '.join(keys)}"
        if described := next((field.description for field in fields if field and field.description), None):
            return described
    return f"a map with keys of {', '.join(model.known_keys())}"


def expected(field: FieldInfo) -> str | None:
    """Return the text after "expected" for this field; None if only its keys describe it."""
    return next(_words([*reversed(field.metadata), field.annotation]), None)


def _words(found: Sequence[Any]) -> Iterator[str]:
    yield from (item.words for item in found if isinstance(item, Expected))
    for item in found:
        if get_origin(item) is Literal:
            *others, last = map(str, get_args(item))
            yield f"{', '.join(others)} or {last}" if others else last
        elif not isinstance(item, Expected) and get_args(item):
            yield from _words(get_args(item))
