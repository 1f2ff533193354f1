from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_det.search.sample import NumpyRandom

SEEDS = st.integers(0, 2**32 - 1)
WIDTHS = st.one_of(
    st.integers(1, 2**64),
    st.integers(1, 300),
    st.sampled_from([width + i for width in (2**31, 2**32, 2**33, 2**63) for i in (-1, 0, 1)] + [2**64 - 1, 2**64]),
)
INTEGERS = st.tuples(st.integers(-(2**63), 2**63 - 1), WIDTHS).filter(lambda ends: sum(ends) <= 2**63)


@given(SEEDS, st.lists(INTEGERS, max_size=20))
def test_whole_numbers_are_numpys_and_leave_its_stream_where_numpy_does(
    seed: int, ranges: list[tuple[int, int]]
) -> None:
    ours, theirs = NumpyRandom(seed), np.random.RandomState(seed)
    for low, width in ranges:
        assert ours.randrange(low, low + width) == theirs.randint(low, low + width, dtype=np.int64)
    assert ours.random() == theirs.random_sample()


@given(SEEDS, st.floats(-1e300, 1e300), st.floats(-1e300, 1e300))
def test_numbers_of_a_range_are_numpys(seed: int, low: float, high: float) -> None:
    ours, theirs = NumpyRandom(seed), np.random.RandomState(seed)
    assert [ours.uniform(low, high) for _ in range(3)] == list(theirs.uniform(low, high, 3))


@pytest.mark.parametrize("seed", [0, 1, 777, 2**31 - 1, 2**32 - 1])
def test_a_long_stream_is_numpys(seed: int) -> None:
    """Longer than the generator's state, which is then made anew."""
    ours, theirs = NumpyRandom(seed), np.random.RandomState(seed)
    assert [ours.uint32() for _ in range(2000)] == theirs.randint(0, 2**32, 2000, dtype=np.uint32).tolist()
