from __future__ import annotations

from tests.cli.conftest import Command


def test_without_a_terminal_it_says_what_to_do(hpc_det: Command) -> None:
    said = "hpc-det: top: this is no terminal; see the same with `hpc-det experiment list`\n"
    assert hpc_det("top") == (2, "", said)
