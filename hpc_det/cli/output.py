"""Output of commands: tables, JSON, CSV, a sentence for each item, and confirmation prompts.

Every command that shows data prints a table for people, and has the options --json and --csv for programs.

A record is plain data, as `--json` prints it. In a table, each record is a row of cells that are computed from it.
`--csv` prints the record itself, with nested keys joined by dots, so that a program gets every value in full.
"""

from __future__ import annotations

import csv
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hpc_det.cli.commands import bundle
from hpc_det.errors import HpcDetError, UsageError, printable, refused, remedy_of, visible
from hpc_det.node.files import write_atomic
from hpc_det.view.formatting import columns

if TYPE_CHECKING:
    from rich.text import Text

Record = Mapping[str, Any]
MOST_BY_RICH = 100  # larger tables are printed without rich, which takes half a second for a thousand rows
COLOURS = {
    "RUNNING": "green",
    "SUSPENDED": "yellow",
    "COMPLETED": "cyan",
    "SUBMITTING": "yellow",
    "QUEUED": "yellow",
    "PAUSED": "yellow",
    "ERROR": "red",
    "INVALID": "red",
    "CANCELED": "magenta",
}


@dataclass(frozen=True)
class Column:
    """A table column: its heading, and the function that returns the cell of a record."""

    heading: str
    cell: Callable[[Record], str]


def column(heading: str, key: str, *, missing: str = "-") -> Column:
    """Return a column with the record's value of `key` as text, or `missing` if the value is None."""

    def cell(record: Record) -> str:
        return missing if record[key] is None else str(record[key])

    return Column(heading, cell)


@dataclass(frozen=True)
class Output:
    """The output format of a command: for people (the default), JSON or CSV."""

    as_json: bool = False
    as_csv: bool = False

    def table(self, records: Sequence[Record], shown: Sequence[Column], keys: str = "") -> None:
        """Print one row per record.

        `keys`: the CSV heading if there are no records, as names separated by blanks.
        """
        if self.as_json:
            _print_json(records)
        elif self.as_csv:
            _print_csv(records, keys)
        else:
            _print_table(rows(records, shown))

    @property
    def is_for_people(self) -> bool:
        """True if neither JSON nor CSV was requested."""
        return not self.as_json and not self.as_csv

    def details(self, records: Sequence[Record]) -> None:
        """Print complete records for programs: JSON (a single record as an object, several as a list) or CSV."""
        if self.as_csv:
            _print_csv(records)
        else:
            _print_json(records[0] if len(records) == 1 else records)

    def stream(self, records: Iterable[Record], headings: Sequence[str]) -> None:
        """Print records as they arrive, for programs: as JSON lines or as CSV."""
        if self.as_csv:
            writer = csv.DictWriter(sys.stdout, headings, lineterminator="\n")
            writer.writeheader()
            writer.writerows(records)
        else:
            sys.stdout.writelines(f"{json.dumps(record)}\n" for record in records)


def _output(as_json: bool, as_csv: bool) -> Output:
    if as_json and as_csv:
        raise click.UsageError("--csv: conflicts with --json; give one of them")
    return Output(as_json=as_json, as_csv=as_csv)


output_options = bundle(
    "output",
    _output,
    click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs."),
    click.option("--csv", "as_csv", is_flag=True, help="Print CSV with a heading line, for spreadsheets."),
)
"""Decorator: the command receives the format as one argument `output`."""


def _print_json(data: Any) -> None:
    click.echo(json.dumps(data, indent=1))


def _print_csv(records: Sequence[Record], keys: str = "") -> None:
    flat = [_flat(record) for record in records]
    # records may differ in their nested keys: the headings are the union, in order of appearance
    headings = dict.fromkeys(name for row in flat for name in row) or keys.split()
    writer = csv.DictWriter(sys.stdout, headings, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(flat)


def _flat(record: Record, prefix: str = "") -> dict[str, Any]:
    """Return the record without nesting: keys joined by dots, lists and booleans as JSON, None for an empty cell."""
    found: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, dict) and value:
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = json.dumps(value) if isinstance(value, (list, dict, bool)) else value
    return found


def show(text: str) -> None:
    """Print text for people, with control characters spelled out."""
    click.echo(visible(text))  # names and messages in it may come from other users


_HEADING = r"(?m)^\S.*$"
_LABEL = r"(?m)^  [A-Z]\w*:(?=\s|$)"
_STATE = rf"(?m)(?<=^  State: {{6}})(?:{'|'.join(COLOURS)})\b|(?<=  )(?:{'|'.join(COLOURS)})(?=  |$)"


def styled(text: str) -> Text:
    """Return the text of a `describe` command with bold headings, dim labels and the colours of states."""
    from rich.text import Text

    found = Text(visible(text))
    found.highlight_regex(_HEADING, "bold")
    found.highlight_regex(_LABEL, "dim")
    found.highlight_regex(_STATE, lambda word: COLOURS[word])
    return found


def show_description(text: str) -> None:
    """Print the text of a `describe` command; with colours if stdout is a terminal and NO_COLOR is not set."""
    if not sys.stdout.isatty():
        show(text)
        return
    from rich.console import Console

    Console().print(styled(text), soft_wrap=True)


# SGR sequences, which set the colours of text. Any other sequence would move the cursor or change the terminal.
_COLOUR = re.compile(r"(\x1b\[[0-9;:]*m)")
_NO_COLOUR = "\x1b[0m"


def log_line(line: str) -> str:
    """Return a log line that is safe to print on a terminal.

    Colours are kept, a progress bar is reduced to its last state, and other control characters are spelled out.
    """
    line = line.rstrip("\r").rpartition("\r")[2]  # a progress bar overwrites its line after each carriage return
    coloured = _COLOUR.split(line)
    if len(coloured) == 1:
        return visible(line)
    parts = [part if number % 2 else visible(part) for number, part in enumerate(coloured)]
    return "".join([*parts, _NO_COLOUR])  # the colours must not continue in the next line


def rows(records: Sequence[Record], shown: Sequence[Column]) -> list[list[str]]:
    """Return the headings and a row for each record."""
    # Other users may have written names and metrics: their control characters must not reach the terminal.
    cells = ([printable(column.cell(record)) for column in shown] for record in records)
    return [[column.heading for column in shown], *cells]


def _print_table(table: Sequence[Sequence[str]]) -> None:
    if sys.stdout.isatty() and len(table) <= MOST_BY_RICH:
        _draw(*table)
    else:
        click.echo("\n".join(columns(table)))


def _draw(headings: Sequence[str], *rows: Sequence[str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style=COLOURS.get(cell, "")) for cell in row))
    Console().print(table)


Thing = TypeVar("Thing")
Made = TypeVar("Made")


def at_once(things: Sequence[Thing], act: Callable[[Thing], Made]) -> list[Made]:
    """Call `act` for each thing and return the results. If it fails for one, the others are still processed.

    In that case all problems are raised at the end: as UsageError if all of them are usage errors, else as HpcDetError.
    """
    made: list[Made] = []
    failed: list[HpcDetError] = []
    for thing in things:
        try:
            made.append(act(thing))
        except HpcDetError as error:
            failed.append(error)
        except OSError as error:
            failed.append(refused(error))
    if failed:
        kind = UsageError if all(isinstance(error, UsageError) for error in failed) else HpcDetError
        raise kind([problem for error in failed for problem in error.problems])
    return made


def each(things: Sequence[Thing], act: Callable[[Thing], str | None], *, side_by_side: int = 1) -> None:
    """Call `act` for each thing, `side_by_side` at a time, and print the results in the order of the things.

    Errors are raised at the end, as by `at_once`.
    """
    from concurrent.futures import ThreadPoolExecutor  # this import takes a third of the time of a small command

    def show_result(text: str | None) -> None:
        if text:
            show(text)

    if side_by_side == 1:  # in this thread, so that Ctrl-C interrupts an `act` that waits
        at_once(things, lambda thing: show_result(act(thing)))
        return
    with ThreadPoolExecutor(side_by_side) as workers:
        at_once([workers.submit(act, thing) for thing in things], lambda future: show_result(future.result()))


yes_option = click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")


def write_file(path: Path, text: str) -> None:
    """Write the file that the option --output names: a new or a regular one; through a link, its target.

    Raises UsageError if it cannot be written.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        kind = "a folder" if target.is_dir() else "no regular file"
        raise UsageError(f"--output: {path}: is {kind}; name a file")
    try:
        write_atomic(target, text)
    except OSError as error:
        remedy = remedy_of(error) or "name a file in a folder that you may write to"
        raise UsageError(f"--output: {path}: {error.strerror}; {remedy}") from None


def confirm(question: str, *, yes: bool) -> None:
    """Return if the answer is yes. Raises HpcDetError if it is no, UsageError if stdin is not a terminal."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(f"{question} stdin is not a terminal; pass --yes")
    if not click.confirm(question, err=True):
        raise HpcDetError("nothing was changed")
