from __future__ import annotations

from tests.cli.conftest import Command


def test_without_a_terminal_it_says_what_to_do(hpc_det: Command) -> None:
    assert hpc_det("top").fails(2, "top", "terminal", "hpc-det experiment list")
