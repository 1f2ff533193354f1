"""Waiting for other processes."""

from __future__ import annotations

import time
from collections.abc import Callable

DEADLINE_S = 300.0
"""Deadline [s] for a gang or an experiment that might wait forever. It is long because the machine may stall for a
minute, which is not a failure. A test of something that must happen soon passes a shorter one.
"""


def wait_for(
    condition: Callable[[], object],
    deadline_s: float = 120,
    otherwise: Callable[[], object] = lambda: "",
    every_s: float = 0.005,
) -> None:
    """Wait until the condition holds; after `deadline_s` seconds fail with the text from `otherwise`."""
    end = time.monotonic() + deadline_s
    late = False
    while not condition():
        assert not late, f"not within {deadline_s} s\n{otherwise()}"
        time.sleep(every_s)
        late = time.monotonic() > end  # the condition is checked once more: this process, too, may have stalled
