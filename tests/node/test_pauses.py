"""A process that was stopped finds how long."""

from __future__ import annotations

from hpc_det.node.pauses import Pauses


def test_only_what_is_longer_than_between_looks_is_a_pause() -> None:
    now = 0.0
    pauses = Pauses(1.0, lambda: now)
    found = []
    for now in (1.0, 3.5, 103.5, 104.5):  # noqa: B007  # the clock reads it
        found.append(pauses.look())
    assert found == [0, 0, 100, 0]
