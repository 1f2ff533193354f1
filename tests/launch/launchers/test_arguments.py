"""Determined's table of arguments for torch_distributed, and the intended differences from it."""

from __future__ import annotations

import pytest

from hpc_det.errors import UsageError
from hpc_det.launch.launchers.arguments import Launch, asks_for_help, parse
from tests.facts import refused, unnamed

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


@pytest.mark.parametrize("launcher", ["deepspeed", "direct"])
@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("script arg", ("script", "arg")),
        ("script --trial", ("script", "--trial")),
        ("script -- arg", ("script", "--", "arg")),
        ("-m package -- arg", ("-m", "package", "--", "arg")),
        ("-- script -- arg", ("script", "--", "arg")),
    ],
)
def test_dashes_after_a_script_are_the_scripts_own_where_upstream_keeps_them(
    launcher: str, line: str, command: tuple[str, ...]
) -> None:
    """harness/tests/launch/test_deepspeed.py; `direct`, which Determined does not have, takes no overrides either."""
    assert parse(line.split(), launcher) == Launch((), command)


def test_deepspeeds_flags_before_the_dashes_are_overrides_and_direct_takes_none() -> None:
    line = ["--bind_cores_to_rank", "--", "script", "--", "arg"]
    assert parse(line, "deepspeed") == Launch(("--bind_cores_to_rank",), ("script", "--", "arg"))
    with refused(UsageError, "--bind_cores_to_rank", "hpc_det.launch.direct"):
        parse(line, "direct")


@pytest.mark.parametrize("line", ["-h", "--help", "-- -h", "o1 -- --help", "--trial m:C -h"])
def test_help_is_asked_for_before_the_script(line: str) -> None:
    assert asks_for_help(line.split(), "torch_distributed")


@pytest.mark.parametrize("line", ["", "script -h", "-h -- script", "-m module --help", "--trial m:C"])
def test_help_flags_of_the_script_and_of_the_underlying_launcher_stay_theirs(line: str) -> None:
    assert not asks_for_help(line.split(), "torch_distributed")


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
