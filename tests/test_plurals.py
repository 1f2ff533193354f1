"""Messages: a number before a noun is written with `errors.count`, so that none says "1 batches"."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from hpc_det.errors import count, plural

PACKAGE = Path(__file__).parents[1] / "hpc_det"
NOUNS = (
    "attempts|batches|checkpoints|copies|entries|epochs|experiments|failures|files|folders|hosts|jobs|minutes|nodes|"
    "processes|ranks|records|slots|trials|workers|GPUs|CPUs"
)
_PLURAL = re.compile(rf"\)? (?:more |other )?({NOUNS})\b")
_CONSTANT = re.compile(r"_?[A-Z][A-Z_]+")
ELSEWHERE = ("compat",)
"""Folders with messages whose form another product has set."""
NO_NUMBERS = {
    "', '.join(map(str, self.stops))",
    "_rounded(row.batches_per_s)",
    "f'{files:,}'",
    "reached(record)",
}
"""Expressions before a noun that are a text, a rate, or never 1."""


def uncounted(source: str) -> Iterator[str]:
    """Yield each expression in an f-string that stands before a plural noun."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            for before, after in pairwise(node.values):
                if isinstance(before, ast.FormattedValue) and isinstance(after, ast.Constant):
                    expression = ast.unparse(before.value)
                    if before.format_spec:
                        expression = ast.unparse(ast.JoinedStr([before]))
                    if _PLURAL.match(str(after.value)) and not _CONSTANT.fullmatch(expression):
                        yield expression


def modules() -> list[Path]:
    found = (path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in ELSEWHERE)
    return [path for path in found if path != PACKAGE / "errors.py"]


def test_a_number_before_a_plural_is_found() -> None:
    assert [*uncounted('f"{n} batches and {len(x)} more trials, {MOST} jobs, {name} ran"')] == ["n", "len(x)"]
    assert [*uncounted("f\"{count(n, 'batch')} of {total}\"")] == []


def test_every_number_before_a_noun_is_counted() -> None:
    found = {
        f"{path.relative_to(PACKAGE)}: {{{expression}}}"
        for path in modules()
        for expression in uncounted(path.read_text(encoding="utf-8"))
        if expression not in NO_NUMBERS
    }
    assert sorted(found) == []


@pytest.mark.parametrize(
    ("noun", "expected"),
    [
        ("batch", "batches"),
        ("epoch", "epochs"),
        ("copy", "copies"),
        ("process", "processes"),
        ("day", "days"),
        ("slot", "slots"),
    ],
)
def test_nouns_have_their_plural(noun: str, expected: str) -> None:
    assert plural(noun) == expected
    assert (count(0, noun), count(1, noun), count(2, noun)) == (f"0 {expected}", f"1 {noun}", f"2 {expected}")
