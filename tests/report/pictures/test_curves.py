from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from hpc_det.report.pictures.curves import Lines, curves, thinned, unbroken

CURVE = st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=300).map(lambda values: list(enumerate(values)))


@given(CURVE, st.integers(8, 100))
def test_thinning_keeps_ends_order_and_every_peak(curve: list[tuple[float, float]], most: int) -> None:
    kept = thinned(curve, most)
    assert (kept[0], kept[-1]) == (curve[0], curve[-1])
    assert len(kept) <= max(most, 4)
    assert kept == sorted(kept)
    values = [value for _, value in kept]
    assert (min(values), max(values)) == (min(v for _, v in curve), max(v for _, v in curve))


def test_a_short_curve_is_drawn_as_it_is() -> None:
    assert thinned([(1, 2.0), (2, 1.0)], 8) == [(1, 2.0), (2, 1.0)]


def test_what_is_no_number_breaks_a_curve() -> None:
    assert list(unbroken([(1, 0.5), (2, None), (3, None), (4, 0.2), (5, 0.1)])) == [[(1, 0.5)], [(4, 0.2), (5, 0.1)]]


def test_each_trial_has_a_curve_and_the_picture_a_text_for_who_cannot_see_it() -> None:
    lines = Lines({1: "v0", 2: "v6"}, {1: "trial 1: lr: 0.1", 2: "trial 2: lr: <0.2>"})
    picture = curves("loss", {1: [(10, 0.5), (20, 0.25)], 2: [(10, None), (20, 1.0)]}, lines, 100)
    assert picture.count('class="t curve') == 2
    assert "<title>loss of 2 trials against batches, from 0.25 to 1</title>" in picture
    assert 'role="img"' in picture
    assert "<title>trial 1: lr: 0.1</title>" in picture
    assert "<title>trial 2: lr: &lt;0.2&gt;</title>" in picture


def test_only_a_logarithmic_axis_states_its_scale_for_the_script() -> None:
    lines = Lines({1: "v0"}, {1: "trial 1"})
    assert "data-log" not in curves("loss", {1: [(1, 1.0), (2, 2.0)]}, lines, 100)
    found = re.search(r'data-log="(\S+) (\S+) ', curves("loss", {1: [(1, 0.001), (2, 2.0)]}, lines, 100))
    assert found
    assert (float(found[1]), float(found[2])) == (0.001, 2.0)
