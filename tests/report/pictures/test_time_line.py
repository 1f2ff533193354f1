from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_det.report.pictures.time_line import FINEST, columns

WIDTHS = st.lists(st.tuples(st.sampled_from(["training", "saving", "lost"]), st.floats(0.01, 20)), max_size=60)


@given(WIDTHS)
def test_each_phase_keeps_its_share_however_short_its_spans_are(widths: list[tuple[str, float]]) -> None:
    spans, at = [], 0.0
    for phase, width in widths:
        spans.append((phase, at, at + width))
        at += width
    drawn = list(columns(spans))
    for phase in ("training", "saving", "lost"):
        wanted = sum(end - begin for its, begin, end in spans if its == phase)
        assert sum(end - begin for its, begin, end in drawn if its == phase) == pytest.approx(wanted, abs=1e-6)
    ends = [0.0, *(end for _, _, end in drawn)]
    assert [begin for _, begin, _ in drawn] == pytest.approx(ends[:-1], abs=1e-6)


def test_thousands_of_slivers_become_as_many_columns_as_can_be_seen() -> None:
    slivers = [(("training", "saving")[i % 2], i / 100, (i + 1) / 100) for i in range(10_000)]
    assert len(list(columns(slivers))) <= 2 * 100 / FINEST + 2
