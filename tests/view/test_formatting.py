from __future__ import annotations

import time
from typing import Any

import pytest
import yaml

from hpc_det.errors import count, length_in_words
from hpc_det.view.formatting import (
    LONGEST_VALUE,
    clock,
    columns,
    cut,
    date_and_time,
    duration,
    labelled,
    number,
    number_if_known,
    percent,
    quantity,
    ratio,
    reached,
    section,
    setting,
    size,
    sparkline,
)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "null"),
        (0.123456, "0.12346"),
        (12345.0, "12345"),
        (True, "true"),
        ("NaN", "NaN"),
        ([1, {"a": 2}], "[1, {a: 2}]"),
    ],
)
def test_a_value_has_five_digits_or_is_yaml(value: object, expected: str) -> None:
    assert number(value) == expected


def test_of_a_long_value_the_beginning_is_shown() -> None:
    assert len(number(list(range(100)))) == LONGEST_VALUE
    assert [number_if_known(None), number_if_known(1.0)] == ["-", "1"]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0 s"),
        (85e-6, "85 us"),
        (0.0625, "62.5 ms"),
        (0.9996, "1.0 s"),
        (37.6, "37.6 s"),
        (59.99, "1 min"),
        (61, "1 min 1 s"),
        (12_030, "3 h 20 min"),
        (86_400, "1 d"),
        (86_400 + 59, "1 d"),
    ],
)
def test_a_duration_has_the_two_greatest_units(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected


@pytest.mark.parametrize(("bytes_", "expected"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**41, "2.0 TiB")])
def test_a_size_has_binary_units(bytes_: int, expected: str) -> None:
    assert size(bytes_) == expected


@pytest.mark.parametrize(
    ("amount", "unit", "expected"),
    [(39.6, "%", "40%"), (12.2, "1/s", "12/s"), (1536, "bytes", "1.5 KiB"), (1536, "bytes/s", "1.5 KiB/s")],
)
def test_a_quantity_has_its_unit(amount: float, unit: str, expected: str) -> None:
    assert quantity(amount, unit) == expected


def test_shares_ratios_and_counts() -> None:
    assert [percent(0.634), percent(None), ratio(1.869), ratio(None)] == ["63%", "-", "1.87", "-"]
    assert [count(1, "file"), count(2, "file"), length_in_words(1, "batches")] == ["1 file", "2 files", "1 batch"]


def test_a_clock_shows_the_date_of_another_day() -> None:
    now = time.mktime((2026, 11, 22, 12, 0, 0, 0, 0, -1))
    assert clock(now - 60, now) == "11:59:00"
    assert clock(now - 86_400, now) == date_and_time(now - 86_400) == "2026-11-21 12:00:00"
    assert date_and_time(None) == "-"


@pytest.mark.parametrize(
    ("batches", "total", "trials", "expected"),
    [
        (20, 400, None, "20/400"),
        (0, None, None, "0/?"),
        (None, None, {"expected": 4, "completed": 1, "failed": 1}, "2/4 trials"),
        (None, None, None, "-"),
    ],
)
def test_progress_is_batches_or_trials(
    batches: int | None, total: int | None, trials: dict[str, Any] | None, expected: str
) -> None:
    record = {"state": "RUNNING", "batches": batches, "total_batches": total, "trials": trials}
    assert reached(record) == expected


def test_what_has_been_completed_is_the_whole() -> None:
    assert reached({"state": "COMPLETED", "batches": 40, "total_batches": None, "trials": None}) == "40/40"


@pytest.mark.parametrize(
    ("values", "width", "expected"),
    [
        ((), 4, ""),
        ((1.0,), 4, "▁"),
        ((2.0, 2.0), 4, "▁▁"),
        ((8.0, 1.0), 4, "█▁"),
        (tuple(map(float, range(8))), 8, "▁▂▃▄▅▆▇█"),
        ((4.0, 4.0, 0.0, 0.0), 2, "█▁"),
        ((0.0, 0.0, 0.0, 7.0, 7.0), 2, "▁█"),
    ],
)
def test_a_sparkline_has_a_block_for_a_value_or_for_the_mean_of_some(
    values: tuple[float, ...], width: int, expected: str
) -> None:
    assert sparkline(values, width) == expected


def test_text_is_cut_and_laid_out() -> None:
    assert [cut("abcdef", 4), cut("abcd", 4)] == ["abc…", "abcd"]
    assert columns([["A", "B"], ["long", "x"]]) == ["A     B", "long  x"]
    assert labelled({"State": "a\x1b[2J"}) == ["  State:      a\\x1b[2J"]
    assert section("Notes", ["one"]) == ["Notes:", "  one"]
    assert section("Notes", []) == []


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"lr": 0.123456789, "width": 1234567}, "{lr: 0.12346, width: 1234567}"),
        ({"optimizer": {"name": "adam", "betas": [0.9, 0.999]}}, "{optimizer: {name: adam, betas: [0.9, 0.999]}}"),
        ([None, True, 2.0], "[null, true, 2]"),
        (
            ["yes", "1e3", "a: b", "", "two words", "x/y.txt", "#c"],
            '["yes", "1e3", "a: b", "", two words, x/y.txt, "#c"]',
        ),
    ],
)
def test_a_setting_is_a_line_of_yaml(value: object, text: str) -> None:
    assert setting(value) == text
    assert setting(yaml.safe_load(text)) == text
