"""The three ways in which a command shows what it found."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from pathlib import Path

import click
import pytest

from hpc_det.cli.main import cli
from hpc_det.cli.output import MOST_BY_RICH, Output, at_once, column, each, log_line
from hpc_det.errors import HpcDetError, UsageError, visible
from hpc_det.node.json_files import read_json, write_json
from hpc_det.requeue import Action, Cause
from tests.cli.conftest import Command
from tests.cli.life import FakeScheduler, Life
from tests.cli.test_main import commands
from tests.facts import each_names, refused, unnamed

RECORDS = [
    {"id": 1, "state": "RUNNING", "best": {"metric": "accuracy", "value": 0.5}, "labels": ["a", "b,c"], "why": None},
    {"id": 12, "state": "ERROR", "best": None, "labels": [], "why": 'said "no"'},
]
SHOWN = [column("ID", "id"), column("STATE", "state"), column("WHY", "why")]


def test_a_table_has_a_line_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    Output().table(RECORDS, SHOWN)
    assert capsys.readouterr().out == 'ID  STATE    WHY\n1   RUNNING  -\n12  ERROR    said "no"\n'


def test_json_has_every_value_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    Output(as_json=True).table(RECORDS, SHOWN)
    assert json.loads(capsys.readouterr().out) == RECORDS


def test_csv_has_dotted_names_and_lists_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    Output(as_csv=True).table(RECORDS, SHOWN)
    first, second = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert (first["best.metric"], first["best.value"], first["labels"], first["why"]) == (
        "accuracy",
        "0.5",
        '["a", "b,c"]',
        "",
    )
    assert (second["id"], second["best.value"], second["labels"], second["why"]) == ("12", "", "[]", 'said "no"')


@pytest.mark.parametrize(
    ("full", "empty"),
    [
        ("experiment list", "experiment list --state PAUSED"),
        ("experiment list-trials 1", "experiment list-trials 2"),
        ("experiment list-checkpoints 1", "experiment list-checkpoints 2"),
        ("trial list-checkpoints 1/1", "trial list-checkpoints 3/1"),
        ("trial describe 1/1 --metrics", "trial describe 3/1 --metrics"),
    ],
)
def test_csv_of_nothing_is_the_line_of_headings(
    hpc_det: Command, root: Path, scheduler: FakeScheduler, full: str, empty: str
) -> None:
    trained, _, begun = (Life.submitted(root) for _ in range(3))
    trained.begins()
    trained.reports("validation", 100, {"accuracy": 0.5})
    trained.saves(100)
    begun.begins()
    record = json.loads(hpc_det(*full.split(), "--json").out)[0]
    assert hpc_det(*empty.split(), "--csv") == (0, f"{','.join(record)}\n", "")


@pytest.mark.parametrize("rows", [2, MOST_BY_RICH + 1])
def test_on_a_terminal_a_table_may_have_colours_and_says_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    Output().table([*RECORDS, *({**RECORDS[0], "id": number} for number in range(13, 11 + rows))], SHOWN)
    lines = capsys.readouterr().out.splitlines()
    assert [click.unstyle(line).split() for line in lines[:3]] == [
        ["ID", "STATE", "WHY"],
        ["1", "RUNNING", "-"],
        ["12", *WHY],
    ]
    assert len(lines) == 1 + rows


WHY = ["ERROR", "said", '"no"']


def test_of_a_single_thing_json_is_no_list(hpc_det: Command, life: Life, scheduler: FakeScheduler) -> None:
    assert json.loads(hpc_det("e", "describe", "1", "--json").out)["id"] == 1
    assert [found["id"] for found in json.loads(hpc_det("e", "describe", "1,1", "--json").out)["trials"]] == []


def test_both_at_once_are_refused(hpc_det: Command, life: Life) -> None:
    code, out, err = hpc_det("e", "list", "--json", "--csv")
    assert (code, out) == (2, "")
    assert not unnamed(err, "--csv", "--json")


SHOWS = {
    "list",
    "show",
    "config",
    "list-trials",
    "list-checkpoints",
    "describe",
    "status",
    "preview-search",
    "doctor",
    "version",
}


@pytest.mark.parametrize("command", [c for c in commands(cli) if c.name in SHOWS], ids=lambda command: command.name)
def test_every_command_that_shows_something_has_all_three(command: click.Command) -> None:
    options = {option for param in command.params for option in param.opts}
    assert {"--json", "--csv"} <= options


def test_what_others_wrote_is_no_command_to_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    Output().table([{"id": 1, "state": "\x1b[2Jgone", "why": "a\nb"}], SHOWN)
    assert capsys.readouterr().out.splitlines()[1].split() == ["1", "\\x1b[2Jgone", "a\\nb"]


# --- what others wrote, on a terminal

HOSTILE = "a\x1b]0;title\x07\x1b[2J\x9b31m\x08\u202eb\x7f"
"""Sets the title, clears the screen, goes back one character, turns the text around."""


def test_commands_to_a_terminal_are_spelled_out() -> None:
    assert visible(HOSTILE) == r"a\x1b]0;title\x07\x1b[2J\x9b31m\x08\u202eb\x7f"
    assert visible("naïve\ttext, two\nlines: 日本語 👩‍🔬") == "naïve\ttext, two\nlines: 日本語 👩‍🔬"
    assert visible("a\rb") == r"a\rb"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("plain", "plain"),
        ("\x1b[1;31mred\x1b[0m and not", "\x1b[1;31mred\x1b[0m and not\x1b[0m"),
        ("\x1b[31mred \x1b[2J\x1b]52;c;x\x07", "\x1b[31mred \\x1b[2J\\x1b]52;c;x\\x07\x1b[0m"),
        ("10%\r50%\r100%", "100%"),
        ("windows\r", "windows"),
        (HOSTILE, r"a\x1b]0;title\x07\x1b[2J\x9b31m\x08\u202eb\x7f"),
    ],
)
def test_a_line_of_a_log_keeps_its_colours_alone(line: str, shown: str) -> None:
    assert log_line(line) == shown


@pytest.mark.integration
def test_no_command_lets_what_others_wrote_through(
    root: Path, hpc_det: Command, scheduler: FakeScheduler, tmp_path: Path
) -> None:
    life = Life.submitted(root, title=HOSTILE)
    effective = read_json(life.folder.effective)
    assert effective is not None
    write_json(life.folder.effective, {**effective, "description": HOSTILE, "labels": [HOSTILE]})
    life.begins()
    life.reports("validation", 10, {"accuracy": 0.5, HOSTILE: 0.5})
    life.rank_prints(0, f"{HOSTILE}\n")
    life.ends(Cause.FAILED, Action.GIVE_UP, failure=f"rank 0: {HOSTILE}")
    commands = ["e list", "e describe 1", "e list-trials 1", "t describe 1/1", "e logs 1", "t logs 1/1", "e wait 1"]
    for command in [*commands, "task list", "job list", "e describe 1 --json"]:
        told = hpc_det(*command.split())
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", told.out + told.err), command


def act(thing: object) -> str:
    if isinstance(thing, Exception):
        raise thing
    return f"did {thing}"


def test_what_fails_for_one_keeps_nobody_from_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    refused = PermissionError(13, "Permission denied", "/home/ada")
    with pytest.raises(HpcDetError) as raised:
        each([1, UsageError("a: wrong"), 2, refused, 3], act)
    assert capsys.readouterr().out == "did 1\ndid 2\ndid 3\n"
    each_names(raised.value.problems, ["a: wrong"], ["/home/ada: Permission denied", "HPC_DET_ROOT"])
    assert raised.value.exit_code == 1


def test_only_wrong_usage_is_wrong_usage() -> None:
    with refused(UsageError, "a\nb"):
        at_once([UsageError("a"), UsageError("b")], act)


def test_side_by_side_answers_come_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    each(list(range(20)), act, side_by_side=8)
    assert capsys.readouterr().out.splitlines() == [f"did {number}" for number in range(20)]


def test_a_defect_of_ours_is_no_refusal() -> None:
    with pytest.raises(ZeroDivisionError):
        at_once([ZeroDivisionError()], act)
