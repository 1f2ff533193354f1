from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.launch.conftest import gang as gang
from tests.node.line_board import Board


@pytest.fixture
def board() -> Iterator[Board]:
    board = Board()
    try:
        yield board
    finally:
        board.close()
