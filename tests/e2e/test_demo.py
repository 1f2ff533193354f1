"""The time from `make demo` to its first batch."""

from __future__ import annotations

import pytest

from tests.benchmarks.demo import rounds


@pytest.mark.integration
@pytest.mark.long
def test_the_demo_trains_a_batch_within_three_times_the_import_of_torch() -> None:
    assert min(start / imported for imported, start in rounds(3)) < 3
