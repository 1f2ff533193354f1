"""What commands print: tables, JSON, CSV, a sentence for each of several things, a question before a deletion.

Every command that shows something has --json and --csv beside the table for people.

Of a table, one record is a row. A record is plain data, as `--json` prints it; the table's columns are made of it, and
`--csv` is the record itself, with names of nested keys dotted, so that a program gets every value whole.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from hpc_det.cli.commands import bundle
from hpc_det.errors import HpcDetError, UsageError, printable, refused, visible
from hpc_det.view.formatting import columns

Record = Mapping[str, Any]
MOST_BY_RICH = 100
"""Rows of a table that rich draws; it takes half a second for a thousand."""
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
    """Of a table: what stands above it, and a record's cell."""

    heading: str
    cell: Callable[[Record], str]


def column(heading: str, key: str, *, missing: str = "-") -> Column:
    """That shows what the record has under `key` as it is."""

    def cell(record: Record) -> str:
        return missing if record[key] is None else str(record[key])

    return Column(heading, cell)


@dataclass(frozen=True)
class Output:
    """How a command was asked to show what it found."""

    as_json: bool = False
    as_csv: bool = False

    def table(self, records: Sequence[Record], shown: Sequence[Column], keys: str = "") -> None:
        """One record a row. `keys`: of a record, between blanks, for CSV of no records: its line of headings alone."""
        if self.as_json:
            _print_json(records)
        elif self.as_csv:
            _print_csv(records, keys)
        else:
            _print_table(rows(records, shown))

    @property
    def is_for_people(self) -> bool:
        return not self.as_json and not self.as_csv

    def details(self, records: Sequence[Record]) -> None:
        """All that is known of some things, for programs; of a single one, JSON is no list."""
        if self.as_csv:
            _print_csv(records)
        else:
            _print_json(records[0] if len(records) == 1 else records)

    def stream(self, records: Iterable[Record], headings: Sequence[str]) -> None:
        """Records as they come, for programs: JSON lines, or CSV."""
        if self.as_csv:
            writer = csv.DictWriter(sys.stdout, headings, lineterminator="\n")
            writer.writeheader()
            writer.writerows(records)
        else:
            sys.stdout.writelines(f"{json.dumps(record)}\n" for record in records)


def _output(as_json: bool, as_csv: bool) -> Output:
    if as_json and as_csv:
        raise click.UsageError("--csv: --json was given, too; give one of them")
    return Output(as_json=as_json, as_csv=as_csv)


output_options = bundle(
    "output",
    _output,
    click.option("--json", "as_json", is_flag=True, help="For programs: JSON."),
    click.option("--csv", "as_csv", is_flag=True, help="For spreadsheets: a line of headings, then one for each."),
)
"""The command gets one argument `output`."""


def _print_json(data: Any) -> None:
    click.echo(json.dumps(data, indent=1))


def _print_csv(records: Sequence[Record], keys: str = "") -> None:
    flat = [_flat(record) for record in records]
    headings = dict.fromkeys(name for row in flat for name in row) or keys.split()
    writer = csv.DictWriter(sys.stdout, headings, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(flat)


def _flat(record: Record, prefix: str = "") -> dict[str, Any]:
    """Nested keys dotted, lists as JSON, null as nothing."""
    found: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, dict) and value:
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = json.dumps(value) if isinstance(value, (list, dict, bool)) else value
    return found


def show(text: str) -> None:
    """Text for people, of which others may have written a part."""
    click.echo(visible(text))


_COLOUR = re.compile(r"(\x1b\[[0-9;:]*m)")
"""Of letters and their background (SGR), as programs print it; every other sequence would move or change something."""
_NO_COLOUR = "\x1b[0m"


def log_line(line: str) -> str:
    """A line of a log as a terminal may get it: in its colours, of a progress bar what stands there in the end.

    All else that a terminal would take for a command is spelled out.
    """
    line = line.rstrip("\r").rpartition("\r")[2]
    coloured = _COLOUR.split(line)
    if len(coloured) == 1:
        return visible(line)
    parts = [part if number % 2 else visible(part) for number, part in enumerate(coloured)]
    return "".join([*parts, _NO_COLOUR])


def rows(records: Sequence[Record], shown: Sequence[Column]) -> list[list[str]]:
    """The headings, and a row for each record. What others wrote must not reach a terminal as commands."""
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
    """What came of each. What fails for one keeps nobody from the others; raises HpcDetError with all that failed."""
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
    """Do it to each, so many at a time, and say what came of it in their order."""
    from concurrent.futures import ThreadPoolExecutor  # it takes a third of the time of a small command

    def tell(said: str | None) -> None:
        if said:
            show(said)

    if side_by_side == 1:  # in this thread, so that Ctrl-C ends what waits
        at_once(things, lambda thing: tell(act(thing)))
        return
    with ThreadPoolExecutor(side_by_side) as workers:
        at_once([workers.submit(act, thing) for thing in things], lambda said: tell(said.result()))


yes_option = click.option("-y", "--yes", is_flag=True, help="Do it without asking.")


def confirm(question: str, *, yes: bool) -> None:
    """Return if the answer is yes. Raises HpcDetError if it is no, UsageError if stdin is not a terminal."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(f"{question} stdin is not a terminal; pass --yes")
    if not click.confirm(question, err=True):
        raise HpcDetError("nothing was changed")
