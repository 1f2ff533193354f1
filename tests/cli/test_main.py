from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from hpc_det.cli import experiment, job
from hpc_det.cli.commands import LazyCommand
from hpc_det.cli.main import COMMANDS, cli, main
from hpc_det.errors import HpcDetError, UsageError
from tests.cli.conftest import Command
from tests.cli.life import Life

HEAVY = ("torch", "numpy", "hydra", "omegaconf", "pydantic", "submitit", "jinja2", "rich", "textual")


def loaded(*arguments: str) -> set[str]:
    """Which heavy libraries a command loads."""
    code = (
        "import sys; from hpc_det.cli.main import main; main(sys.argv[1:]); "
        f"print(*(name for name in {HEAVY} if name in sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    return set(done.stderr.splitlines()[-1].split())


@pytest.mark.integration
@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["experiment", "--help"],
        ["experiment", "list"],
        ["top", "--help"],
        ["run", "--help"],
        ["job", "--help"],
        ["template", "--help"],
    ],
)
def test_looking_around_loads_nothing_heavy(life: Life, arguments: list[str]) -> None:
    life.begins()
    life.finishes()
    assert loaded(*arguments) == set()


@pytest.mark.integration
def test_the_check_above_can_fail(root: Path) -> None:
    assert "pydantic" in loaded("schema")


@pytest.mark.integration
def test_help_lists_every_command_without_importing_it() -> None:
    code = "import sys; from hpc_det.cli.main import main; main(['--help']); print('hpc_det.cli.run' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
    for command in COMMANDS:
        names = ", ".join(filter(None, [command.name, command.alias]))
        assert re.search(rf"^  {names} +{re.escape(command.help)}$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("command", [*COMMANDS, *experiment.COMMANDS, *job.COMMANDS], ids=lambda command: command.where)
def test_the_help_in_the_list_is_the_commands_own(command: LazyCommand) -> None:
    assert command.load().get_short_help_str(200) == command.help


def commands(group: click.Group) -> list[click.Command]:
    context = click.Context(group)
    found = [group.get_command(context, name) for name in group.list_commands(context)]
    return [leaf for command in found if command for leaf in _leaves(command)]


def _leaves(command: click.Command) -> list[click.Command]:
    return commands(command) if isinstance(command, click.Group) else [command]


@pytest.mark.parametrize("command", commands(cli), ids=lambda command: command.name)
def test_every_commands_help_has_an_example(command: click.Command) -> None:
    assert "Example:\n  hpc-det " in click.Context(command).get_help().replace("\n  ", "\n")


@pytest.mark.parametrize("alias", ["e", "experiment"])
def test_a_group_answers_to_its_alias(hpc_det: Command, alias: str) -> None:
    assert hpc_det(alias, "list").out.startswith("ID")


def test_version(hpc_det: Command) -> None:
    assert hpc_det("--version").out.startswith("hpc-det, version ")


def raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> int:
    def invoke(**_: object) -> None:
        raise error

    monkeypatch.setattr(cli, "main", invoke)
    return main([])


def test_every_problem_is_a_line_on_stderr(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert raising(monkeypatch, UsageError(["a: wrong", "b: wrong\ntoo"])) == 2
    assert capsys.readouterr() == ("", "hpc-det: a: wrong\nhpc-det: b: wrong\nhpc-det: too\n")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (HpcDetError("refused"), 1, "hpc-det: refused\n"),
        (OSError(5, "Input/output error", "/home/ada"), 1, "hpc-det: /home/ada: Input/output error\n"),
        (KeyboardInterrupt(), 130, ""),
        (click.Abort(), 130, ""),
    ],
)
def test_exit_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, said: str
) -> None:
    assert raising(monkeypatch, error) == code
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("arguments", [["nonsense"], ["experiment", "wait"], ["e", "wait", "x"], ["e", "--no"]])
def test_a_wrong_command_line_exits_with_2(hpc_det: Command, arguments: list[str]) -> None:
    result = hpc_det(*arguments)
    assert result.code == 2
    assert "Usage: hpc-det" in result.err


@pytest.mark.parametrize("command", ["describe", "logs", "wait", "kill"])
def test_an_unknown_experiment_is_a_usage_error(hpc_det: Command, root: Path, command: str) -> None:
    result = hpc_det("experiment", command, "7")
    said = (
        f"hpc-det: experiment 7: not found below {root}, which has no experiment; `hpc-det experiment list` shows all\n"
    )
    assert result == (2, "", said)
