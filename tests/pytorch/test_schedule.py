from __future__ import annotations

import math
from typing import Any

import pytest

from hpc_det.pytorch.data import Position
from hpc_det.pytorch.schedule import Length

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"batches": 100}, Length("batches", 100)),
        ({"epochs": 3}, Length("epochs", 3)),
        ({"records": 640}, Length("batches", 10)),
        ({"records": 700}, Length("batches", 10)),
        ({"records": 1}, Length("batches", 1)),
        ({"records": 0}, Length("batches", 0)),
        (100, Length("batches", 100)),
    ],
)
def test_records_become_batches_of_64(config: Any, length: Length) -> None:
    assert Length.from_config(config, 64) == length


@pytest.mark.parametrize(
    ("length", "steps", "position", "reached", "due"),
    [
        (Length("batches", 10), 0, Position(0, 0), False, False),
        (Length("batches", 10), 9, Position(0, 90), False, False),
        (Length("batches", 10), 10, Position(1, 0), True, True),
        (Length("batches", 10), 11, Position(1, 10), True, False),
        (Length("batches", 10), 20, Position(2, 0), True, True),
        (Length("epochs", 2), 0, Position(0, 0), False, False),
        (Length("epochs", 2), 10, Position(1, 0), False, False),
        (Length("epochs", 2), 20, Position(2, 0), True, True),
        (Length("epochs", 2), 21, Position(2, 10), True, False),
        (Length("epochs", 2), 40, Position(4, 0), True, True),
        (Length("batches", 0), 10, Position(1, 0), True, False),
        (Length("epochs", 0), 10, Position(1, 0), True, False),
    ],
)
def test_a_length_is_reached_once_and_due_at_every_multiple(
    length: Length, steps: int, position: Position, reached: bool, due: bool
) -> None:
    assert length.reached(steps, position) is reached
    assert length.due(steps, position) is due


def test_in_batches_for_the_progress_bar() -> None:
    assert Length("epochs", 3).batches(20) == 60
    assert Length("batches", 3).batches(20) == 3
