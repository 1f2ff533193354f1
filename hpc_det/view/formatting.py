"""Numbers, durations, sizes, times and tables as text, the same in the terminal and in the report."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

from hpc_det.errors import count, printable

NONE = "-"
"""Shown for an unknown value."""
LONGEST_VALUE = 60
"""Characters to which a value that is not a number is cut."""

# --- numbers


def number(value: Any) -> str:
    """Return a number with five significant digits; text as it is, other values as `setting`, cut to LONGEST_VALUE."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return f"{value:.5g}"
    text = value if isinstance(value, str) else setting(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."


def number_if_known(value: Any) -> str:
    """Return `number(value)`, or NONE if the value is None."""
    return NONE if value is None else number(value)


def values_in_words(values: Mapping[str, Any]) -> str:
    """Return a text such as `loss 0.25, accuracy 0.9`."""
    return ", ".join(f"{name} {number(value)}" for name, value in values.items())


def settings(values: Mapping[str, Any]) -> str:
    """Return a map as text such as `width: 64, optimizer: {name: adam}`; see `setting`."""
    return ", ".join(f"{setting(name)}: {setting(value)}" for name, value in values.items())


def setting(value: Any) -> str:
    """Return a value of JSON as one line of YAML, with floats of five significant digits."""
    if isinstance(value, Mapping):
        return f"{{{settings(value)}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(setting, value))}]"
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, str) and _NEEDS_NO_QUOTES.fullmatch(value) and value.casefold() not in _NOT_TEXT:
        return value
    return json.dumps(value, ensure_ascii=False)


_NEEDS_NO_QUOTES = re.compile(r"[^\W\d]\w*(?:[ ./+@-]+\w+)*")
_NOT_TEXT = ("true", "false", "null", "yes", "no", "on", "off", "y", "n")
"""Words that YAML does not read as text."""


def percent(share: float | None) -> str:
    """Return a share from 0 to 1 as `63%`."""
    return NONE if share is None else f"{share:.0%}"


def ratio(value: float | None) -> str:
    """Return a text such as `1.87`."""
    return NONE if value is None else f"{value:.2f}"


def size(size_bytes: float) -> str:
    """Return a text such as `512 B` or `1.5 MiB`."""
    amount, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"


def quantity(amount: float, unit: str) -> str:
    """Return an amount in the unit %, bytes, bytes/s or 1/s, such as `40%` or `1.5 MiB/s`."""
    if unit.startswith("bytes"):
        return size(amount) + unit.removeprefix("bytes")
    return f"{amount:.0f}{unit.removeprefix('1')}"


# --- times


_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def duration(seconds: float) -> str:
    """Return a text such as `85 us`, `94 ms` or `37.6 s`; from a minute on with the two largest units: `3 h 20 min`."""
    if seconds < 59.95:  # from here on, one decimal would give 60.0 s
        return _less_than_a_minute(seconds)
    rest = round(seconds)
    parts: list[str] = []
    for unit_s, unit in _UNITS:
        amount, rest = divmod(rest, unit_s)
        if amount or parts:
            parts.append(f"{amount} {unit}" if amount else "")
    return " ".join(filter(None, parts[:2]))


def _less_than_a_minute(seconds: float) -> str:
    if seconds >= 0.9995:  # from here on, three digits would give 1000 ms; likewise for us below
        return f"{seconds:.1f} s"
    if seconds >= 0.9995e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.3g} us" if seconds else "0 s"


def date_and_time(moment: float | None) -> str:
    """Return the local time to the second."""
    return NONE if moment is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def clock(moment: float, now: float) -> str:
    """Return the local time, with the date unless it is today's."""
    date, of_day = date_and_time(moment).split()
    return of_day if date == date_and_time(now).split()[0] else f"{date} {of_day}"


def iso(moment: float) -> str:
    """Return the local time with its offset, to the second, for programs."""
    return datetime.fromtimestamp(moment).astimezone().isoformat(timespec="seconds")


# --- progress


def reached(record: Mapping[str, Any]) -> str:
    """Return the progress: the batches of a single trial as `200/400`, or the ended trials as `3/16 trials`.

    `record`: the fields of a Summary. Its phase takes the place of the batches.
    """
    if record["batches"] is not None:
        total = record["total_batches"] or (record["batches"] if record["state"] == "COMPLETED" else "?")
        return record.get("phase") or f"{record['batches']}/{total}"
    if (trials := record["trials"]) is None:
        return NONE
    return f"{trials['completed'] + trials['failed']}/{count(trials['expected'], 'trial')}"


def batches_of(batches: int, total: int | None) -> str:
    """Return a text such as `200 of 400 batches`."""
    return f"{batches} of {count(total, 'batch') if total else '? batches'}"


_BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a block character for each value, or for the mean of several if there are more than fit."""
    if len(values) > width:
        borders = [place * len(values) // width for place in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(borders)]
    if not values:
        return ""
    low, high = min(values), max(values)
    steps = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((value - low) * steps)] for value in values)


# --- lines


def cut(text: str, width: int) -> str:
    """Return at most `width` characters, with an ellipsis for the rest."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def one_line(text: str) -> str:
    """Return the lines joined by semicolons."""
    return "; ".join(text.splitlines())


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row, with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return [line.rstrip() for line in lines]


def labelled(rows: Mapping[str, str]) -> list[str]:
    """Return an indented line with label and text for each entry. Unprintable characters are escaped."""
    return [f"  {label + ':':<12}{printable(text)}" for label, text in rows.items()]


def section(heading: str, lines: Sequence[str]) -> list[str]:
    """Return the heading and its indented lines; an empty list if there are no lines."""
    return [f"{heading}:", *(f"  {line}" for line in lines)] if lines else []
