"""Determined's table of arguments for torch_distributed, and the intended differences from it."""

from __future__ import annotations

import pytest

from hpc_det.errors import UsageError
from hpc_det.launch.launchers.arguments import Launch, parse
from tests.facts import unnamed

HARNESS = ("-m", "hpc_det.launch.rank")


@pytest.mark.parametrize(
    ("line", "overrides", "command"),
    [
        ("--trial m:C", (), (*HARNESS, "m:C")),
        ("--trial=m:C", (), (*HARNESS, "m:C")),
        ("s a", (), ("s", "a")),
        ("-- s -- a", (), ("s", "--", "a")),
        ("o1 o2 -- s a", ("o1", "o2"), ("s", "a")),
        ("o1 -- --trial m:C", ("o1",), (*HARNESS, "m:C")),
        ("--asdf 1 -- s", ("--asdf", "1"), ("s",)),
        ("s --trial m:C", (), ("s", "--trial", "m:C")),
        ("-m package.module --lr 1", (), ("-m", "package.module", "--lr", "1")),
    ],
)
def test_what_comes_before_the_first_dashes_goes_to_the_launcher(
    line: str, overrides: tuple[str, ...], command: tuple[str, ...]
) -> None:
    assert parse(line.split(), "torch_distributed") == Launch(overrides, command)


@pytest.mark.parametrize(
    ("line", "facts"),
    [
        ("", ["script"]),
        ("--", ["script"]),
        ("o1 --", ["script"]),
        ("--trial m:C s", ["--trial m:C", "s"]),
        ("--trial=m:C s", ["--trial m:C", "s"]),
        ("--trial", ["--trial", "module:Class"]),
        ("--asdf 1 s", ["--asdf"]),
        ("o1 -- --asdf s", ["--asdf"]),
    ],
)
def test_a_line_that_makes_no_sense_is_answered_with_the_usage(line: str, facts: list[str]) -> None:
    with pytest.raises(UsageError) as error:
        parse(line.split(), "torch_distributed")
    first, usage = str(error.value).splitlines()
    assert unnamed(first, "hpc_det.launch.torch_distributed: ", *facts) == []
    assert usage.startswith("usage: python3 -m hpc_det.launch.torch_distributed ")


def test_words_are_kept_as_they_are() -> None:
    words = ["a b", "$(x)", "", "--", "s", "it's", "", "--"]
    assert parse(words, "torch_distributed") == Launch(("a b", "$(x)", ""), ("s", "it's", "", "--"))
