from __future__ import annotations

from tests.conformance.table import AREAS, filled

PAGE = """
<!-- conformance: counts -->

| old |

<!-- conformance: differences -->

"""


def test_the_tables_count_every_row_and_name_every_difference() -> None:
    page = filled(PAGE)
    assert "| old |" not in page
    for area, rows in AREAS.items():
        assert f"| {area} |" in page
        assert all(row.case in page for row in rows if row.differs)


def test_no_two_rows_of_an_area_are_the_same_case() -> None:
    for area, rows in AREAS.items():
        cases = [row.case for row in rows]
        assert sorted(set(cases)) == sorted(cases), area
