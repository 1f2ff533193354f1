"""Generate docs/reference/cli.md from the commands: `python -m tests.docs.cli_page` writes it again."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass

import click

from hpc_det.cli.commands import LazyCommand
from hpc_det.cli.main import COMMANDS

HEAD = """# The command line

Every command, as `--help` shows it. A test executes each example.

- **IDs.** `ID` is the number of an experiment, `IDS` are several, such as `12,15-18`. A trial is `EXPERIMENT/TRIAL`,
  such as `12/7`. If the command fails for one of several IDs, it reports that and continues with the others. If an ID
  does not exist, the command does nothing.
- **Output.** Commands that show something print a table; `--json` and `--csv` print the same for programs.
- **Exit codes.** 0: success. 1: a scheduler, a disk or a training failed. 2: the request is not possible, and nothing
  was changed. 130: interrupted. Each problem is a line on stderr that names the place, the problem and the remedy.
- **Short names.** `e`, `t`, `c`, `j` and `tpl` for groups, `ls` for `list`, `rm` for commands that remove something.
  `hpc-det completion` prints a completion script for your shell, `hpc-det install-det` installs the name `det`.
"""


@dataclass(frozen=True)
class Entry:
    """A command that can be called, with its full name."""

    name: str
    command: click.Command


def entries() -> Iterator[Entry]:
    """Yield all commands, in the order in which `--help` lists them."""
    for lazy in COMMANDS:
        yield from _below(f"hpc-det {lazy.name}", lazy.load())


def examples(entry: Entry) -> list[str]:
    """Return the command lines in the help of a command."""
    found: list[str] = []
    for line in _example(entry.command):
        if found and found[-1].endswith("\\"):
            found[-1] = f"{found[-1].removesuffix(chr(92)).rstrip()} {line.strip()}"
        elif line.startswith("hpc-det "):
            found.append(line)
    return found


def shown(entry: Entry) -> str:
    """Return the output that the help shows for its only example, or an empty string."""
    lines = _example(entry.command)
    last = max(i for i, line in enumerate(lines) if line.startswith("hpc-det ") or lines[i - 1].endswith("\\"))
    return "\n".join(lines[last + 1 :])


def made() -> str:
    """Return the whole page."""
    parts = [HEAD]
    for lazy in COMMANDS:
        parts += [_group(lazy), *map(_section, _below(f"hpc-det {lazy.name}", lazy.load()))]
    return "\n".join(parts)


def _below(name: str, command: click.Command) -> Iterator[Entry]:
    if isinstance(command, click.Group):
        context = click.Context(command)
        for each in sorted(command.list_commands(context)):
            if sub := command.get_command(context, each):
                yield from _below(f"{name} {each}", sub)
    else:
        yield Entry(name, command)


def _group(lazy: LazyCommand) -> str:
    also = f", {lazy.alias}" if lazy.alias else ""
    text = _text(lazy.load()) if isinstance(lazy.load(), click.Group) else ""
    return f"## {lazy.name}{also}\n" + (f"\n{text}\n" if text else "")


def _section(entry: Entry) -> str:
    usage = " ".join([entry.name, *entry.command.collect_usage_pieces(click.Context(entry.command))])
    parts = [f"### {entry.name}", f"    {usage}", _text(entry.command), _options(entry.command), _console(entry)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _text(command: click.Command) -> str:
    """Return the help without the example."""
    before, _, after = _help(command).partition("\b\nExample:\n")
    rest = [line for line in after.splitlines() if line and not line.startswith("  ")]
    return "\n".join([before.rstrip(), *(["", *rest] if rest else [])])


def _example(command: click.Command) -> list[str]:
    _, _, after = _help(command).partition("\b\nExample:\n")
    return [line.removeprefix("  ") for line in after.splitlines() if line.startswith("  ")]


def _help(command: click.Command) -> str:
    return inspect.cleandoc(command.help or "")


def _options(command: click.Command) -> str:
    options = [param for param in command.params if isinstance(param, click.Option) and not param.hidden]
    records = [option.get_help_record(click.Context(command)) for option in options]
    rows = [f"| `{record[0]}` | {_cell(record[1])} |" for record in records if record]
    return "\n".join(["| option | meaning |", "| --- | --- |", *rows]) if rows else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _console(entry: Entry) -> str:
    lines = [f"$ {line}" if line.startswith("hpc-det ") else line for line in _example(entry.command)]
    return "\n".join(["```text", *lines, "```"])
