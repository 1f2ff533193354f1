"""For what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable

DEADLINE_S = 300.0
"""Ends what would wait forever, and nothing else: a machine that is slow for a minute is no failure. Of what has to be
quick, the tests say how quick.
"""


def wait_for(
    condition: Callable[[], object], otherwise: Callable[[], object] = lambda: "", *, deadline_s: float = DEADLINE_S
) -> None:
    """`otherwise`: what is known where it does not come true."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s} s\n{otherwise()}"
        time.sleep(0.005)
