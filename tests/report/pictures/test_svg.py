from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_det.report.pictures.svg import Scale

VALUES = st.lists(st.floats(-1e9, 1e9) | st.floats(1e-9, 1e9), min_size=1, max_size=20)


@given(VALUES)
def test_every_value_lies_on_the_axis_and_so_does_every_tick(values: list[float]) -> None:
    scale = Scale.of(values, 0, 100)
    assert all(-1e-6 <= scale.at(value) <= 100 + 1e-6 for value in (*values, *scale.ticks()))
    assert len(scale.ticks()) <= 12


def test_ticks_are_round() -> None:
    assert Scale.of([0.0, 1.0], 0, 1).ticks() == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert Scale.of([0.0, 460.0], 0, 1).ticks() == [0, 100, 200, 300, 400]
    assert Scale.of([1e-4, 1e-1], 0, 1).ticks() == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1])


def test_what_spans_much_and_is_positive_is_logarithmic() -> None:
    assert Scale.of([0.001, 1.0], 0, 1).is_log
    assert not Scale.of([0.0, 1.0], 0, 1).is_log
    assert not Scale.of([0.5, 1.0], 0, 1).is_log
    assert not Scale.of([0.001, 1.0], 0, 1, may_be_log=False).is_log


def test_a_single_value_lies_in_the_middle() -> None:
    assert Scale.of([7.0, 7.0], 0, 100).at(7) == 50
