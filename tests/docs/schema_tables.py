"""Generate the tables of keys in docs/reference from the schemas of the experiment file and the cluster profile.

A page marks the place of a table by a line `<!-- table: SECTION -->`, or `<!-- table: SECTION KIND -->`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from pydantic.fields import FieldInfo

from hpc_det.config.cluster import Cluster
from hpc_det.config.determined_keys import in_words
from hpc_det.config.fields import Length
from hpc_det.config.schema import Experiment
from hpc_det.config.section import Section, expected, sections_in

_TABLE = re.compile(r"(<!-- table: (.+?) -->\n\n)(?:\|.*\n)*")
TOPS: dict[str, type[Section]] = {"experiment": Experiment, "profile": Cluster}
"""The schemas, by the name of their first table."""


def tables(top: str) -> dict[str, str]:
    """Return the tables in Markdown, by name."""
    return {name: _markdown(name, fields) for name, fields in _sections(top, [TOPS[top]])}


def filled(page: str, top: str) -> str:
    """Return the page with the tables generated again."""
    made = tables(top)
    return _TABLE.sub(lambda found: found[1] + made[found[2]], page)


def _sections(name: str, kinds: list[type[Section]]) -> Iterator[tuple[str, dict[str, FieldInfo]]]:
    common = set.intersection(*(set(kind.known_keys()) for kind in kinds)) - {
        kinds[0].kind_key if len(kinds) > 1 else ""
    }
    yield name, {key: field for key, field in _fields(kinds[0]).items() if key in common}
    if len(kinds) > 1:
        for kind, section in kinds[0].kinds.items():
            if kind:
                yield f"{name} {kind}", {key: field for key, field in _fields(section).items() if key not in common}
    for key, field in _fields(kinds[0]).items():
        if below := [*dict.fromkeys(sections_in(field.annotation))]:
            yield from _sections(key, below)


def _fields(section: type[Section]) -> dict[str, FieldInfo]:
    return {field.alias or name: field for name, field in section.model_fields.items()}


def _markdown(name: str, fields: dict[str, FieldInfo]) -> str:
    rows = [["key", "value", "default", "meaning"], ["---"] * 4]
    above = "" if name in TOPS else f"{name.split()[0]}."
    rows += [
        [f"`{key}`", _value(field), _default(field), f"{field.description}{in_words(above + key)}"]
        for key, field in fields.items()
    ]
    return "".join(_row(cells) for cells in rows)


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def _value(field: FieldInfo) -> str:
    return expected(field) or "a map, see below"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    if default is None or isinstance(default, Section):
        return ""
    if isinstance(default, Length):
        default = {default.unit: default.amount}
    return f"`{json.dumps(default)}`" if default not in ("", {}, []) else ""
