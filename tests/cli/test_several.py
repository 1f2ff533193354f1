"""What a command does with each of several things."""

from __future__ import annotations

import pytest

from hpc_det.cli.output import at_once, each
from hpc_det.errors import HpcDetError, UsageError


def act(thing: object) -> str:
    if isinstance(thing, Exception):
        raise thing
    return f"did {thing}"


def test_what_fails_for_one_keeps_nobody_from_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    refused = PermissionError(13, "Permission denied", "/home/ada")
    with pytest.raises(HpcDetError) as raised:
        each([1, UsageError("a: wrong"), 2, refused, 3], act)
    assert capsys.readouterr().out == "did 1\ndid 2\ndid 3\n"
    assert (raised.value.problems, raised.value.exit_code) == (["a: wrong", "/home/ada: Permission denied"], 1)


def test_only_wrong_usage_is_wrong_usage() -> None:
    with pytest.raises(UsageError, match="a\nb"):
        at_once([UsageError("a"), UsageError("b")], act)


def test_side_by_side_answers_come_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    each(list(range(20)), act, side_by_side=8)
    assert capsys.readouterr().out.splitlines() == [f"did {number}" for number in range(20)]


def test_a_defect_of_ours_is_no_refusal() -> None:
    with pytest.raises(ZeroDivisionError):
        at_once([ZeroDivisionError()], act)
