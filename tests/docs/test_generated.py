"""The generated pages agree with the code."""

from __future__ import annotations

import re

import pytest

from tests.docs import schema_tables
from tests.docs.generated import DOCS, GENERATED

PAGES_OF_KEYS = [("reference/experiment-file.md", "experiment"), ("reference/cluster-profile.md", "profile")]


@pytest.mark.parametrize("name", GENERATED)
def test_a_generated_page_agrees_with_the_code(name: str) -> None:
    page = (DOCS / name).read_text(encoding="utf-8")
    assert GENERATED[name](page) == page, "run `python -m tests.docs.generated`"


@pytest.mark.parametrize(("name", "top"), PAGES_OF_KEYS)
def test_a_page_of_keys_has_a_table_for_every_section(name: str, top: str) -> None:
    marks = re.findall(r"<!-- table: (.+?) -->", (DOCS / name).read_text(encoding="utf-8"))
    assert sorted(marks) == sorted(schema_tables.tables(top))


def test_an_outdated_table_is_noticed() -> None:
    page = (DOCS / "reference/experiment-file.md").read_text(encoding="utf-8")
    outdated = page.replace("`max_restarts`", "`max_restart`")
    assert outdated != page
    assert GENERATED["reference/experiment-file.md"](outdated) == page
