"""The result of the suite as tables of docs/how-to/port-from-determined.md, which `tests.docs.generated` writes.

A row without a difference is the same only because its test passes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tests.conformance import callbacks, configurations, merges, searches, trials
from tests.conformance.row import Row

AREAS: dict[str, Sequence[Row]] = {
    "Experiment files": configurations.ROWS,
    "Templates": merges.ROWS,
    "Searches": searches.ROWS,
    "Trials": trials.ROWS,
    "Callbacks": callbacks.ROWS,
}
"""All rows, by what they are about."""
_PLACE = re.compile(r"(<!-- conformance: (counts|differences) -->\n\n)(?:\|.*\n)*")


def filled(page: str) -> str:
    """Return the page with both tables written again."""
    tables = {"counts": _counts(), "differences": _differences()}
    return _PLACE.sub(lambda found: found[1] + tables[found[2]], page)


def _counts() -> str:
    lines = ["| Area | Upstream files | Cases | Same | Different |", "| --- | --- | --- | --- | --- |"]
    for area, rows in AREAS.items():
        different = sum(bool(row.differs) for row in rows)
        files = len({row.follows for row in rows})
        lines.append(f"| {area} | {files} | {len(rows)} | {len(rows) - different} | {different} |")
    return "\n".join(lines) + "\n"


def _differences() -> str:
    lines = ["| Case | Upstream | Here |", "| --- | --- | --- |"]
    cases: dict[tuple[str, str], list[str]] = {}
    for row in (row for rows in AREAS.values() for row in rows if row.differs):
        cases.setdefault((row.follows, row.differs), []).append(row.case)
    lines += [f"| {'; '.join(names)} | `{follows}` | {differs} |" for (follows, differs), names in cases.items()]
    return "\n".join(lines) + "\n"
