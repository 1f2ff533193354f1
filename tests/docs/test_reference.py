from __future__ import annotations

import re

from tests.docs.reference import PAGE, filled, tables


def test_the_page_says_what_the_schema_says() -> None:
    page = PAGE.read_text()
    assert filled(page) == page, "run `python -m tests.docs.reference`"


def test_the_page_has_a_table_for_every_section() -> None:
    assert sorted(re.findall(r"<!-- table: (.+?) -->", PAGE.read_text())) == sorted(tables())


def test_an_older_page_would_be_told_from_this_one() -> None:
    page = PAGE.read_text()
    assert filled(page.replace("`max_restarts`", "`max_restart`")) == page
