"""For what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable

DEADLINE_S = 300.0
"""Of a gang or an experiment that would wait forever: that a machine stands still for a minute is no failure. What has
to come soon has a shorter one of its own.
"""


def wait_for(
    condition: Callable[[], object],
    deadline_s: float = 120,
    otherwise: Callable[[], object] = lambda: "",
    every_s: float = 0.005,
) -> None:
    """`otherwise`: what is known where it does not come true."""
    end = time.monotonic() + deadline_s
    late = False
    while not condition():
        assert not late, f"not within {deadline_s} s\n{otherwise()}"
        time.sleep(every_s)
        late = time.monotonic() > end  # it is asked once more: this process, too, may have stood still
