"""Each promise in the documentation names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

CHECKOUT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def promises() -> list[str]:
    """Return the rows of the tables of promises."""
    page = (CHECKOUT / "docs" / "reference" / "promises.md").read_text()
    return [row for row in re.findall(r"(?m)^\| (?!---).*$", page) if not row.startswith("| Promise ")]


def names_in(path: Path) -> set[str]:
    return {each.name for each in ast.walk(ast.parse(path.read_text())) if isinstance(each, ast.FunctionDef)}


def test_each_promise_names_tests_that_exist() -> None:
    rows = promises()
    assert rows
    for row in rows:
        named = NAMED.findall(row)
        assert named, row
        assert row.count("::") == len(named), row
        for path, test in named:
            assert test in names_in(CHECKOUT / path), f"{path}::{test}"
