from __future__ import annotations

import math

import pytest

from hpc_det.search.method import better

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("value", "than", "if_smaller", "if_larger"),
    [
        (1.0, 2.0, True, False),
        (2.0, 1.0, False, True),
        (1.0, 1.0, False, False),
        (1.0, None, True, True),
        (1.0, NAN, True, True),
        (NAN, 1.0, False, False),
        (NAN, None, False, False),
        (NAN, NAN, False, False),
        (INF, 1.0, False, True),
        (-INF, 1.0, True, False),
        (INF, None, True, True),
    ],
)
def test_better_is_strict_and_nan_never_is(value: float, than: float | None, if_smaller: bool, if_larger: bool) -> None:
    assert better(value, than, smaller_is_better=True) is if_smaller
    assert better(value, than, smaller_is_better=False) is if_larger
