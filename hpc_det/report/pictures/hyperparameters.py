"""Pictures of hyperparameters: parallel coordinates with a line for each trial, and bars of their importance."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from hpc_det.errors import count
from hpc_det.report.pictures import svg
from hpc_det.report.pictures.curves import Line, Lines
from hpc_det.report.pictures.svg import Scale
from hpc_det.view.formatting import cut, number, percent

WIDTH, HEIGHT, SIDE, TOP, BOTTOM = 1000, 340, 60, 34, 14
MOST_AXES = 10
LONGEST_LABEL = 22
BARS_LEFT, BARS_RIGHT, ROW = 190, 60, 26


@dataclass(frozen=True)
class _Axis:
    """A vertical axis for one hyperparameter or metric."""

    name: str
    x: float
    at: Callable[[Any], float]
    """Returns the y coordinate of a value."""
    labels: list[tuple[float, str]]
    """Pairs of y coordinate and text."""


def parallel(points: Mapping[Line, Sequence[Any]], names: Sequence[str], logarithmic: Set[str], lines: Lines) -> Markup:
    """Return parallel coordinates, with an axis for each name.

    `points`: for each trial, a value for each name, or None if it has none; the last trial is drawn on top.
    `logarithmic`: names whose axis may be logarithmic.
    """
    step = (WIDTH - 2 * SIDE) / max(len(names) - 1, 1)
    axes = [
        _axis(name, SIDE + i * step, [its[i] for its in points.values()], may_be_log=name in logarithmic)
        for i, name in enumerate(names)
    ]
    drawn = (_line(trial, values, axes, lines) for trial, values in points.items())
    said = f"{count(len(points), 'trial')} as lines through {', '.join(names)}"
    return svg.picture(WIDTH, HEIGHT, said, [*drawn, *(part for axis in axes for part in _drawn(axis))], "picture wide")


def _axis(name: str, x: float, values: Sequence[Any], *, may_be_log: bool) -> _Axis:
    """Return an axis with a scale if all values are numbers, otherwise with an evenly spaced place for each value."""
    known = [value for value in values if value is not None]
    if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in known):
        scale = Scale.of(known, HEIGHT - BOTTOM, TOP, may_be_log=may_be_log)
        return _Axis(name, x, scale.at, [(scale.at(tick), number(tick)) for tick in scale.ticks()])
    spelled = sorted({json.dumps(value) for value in known})
    places = {text: index for index, text in enumerate(spelled)}
    even = Scale.of([*places.values(), -0.5, len(places) - 0.5], HEIGHT - BOTTOM, TOP, may_be_log=False)
    labels = [(even.at(place), number(json.loads(text))) for text, place in places.items()]
    return _Axis(name, x, lambda value: even.at(places[json.dumps(value)]), labels)


def _line(trial: Line, values: Sequence[Any], axes: Sequence[_Axis], lines: Lines) -> Markup:
    """Return the line of a trial, interrupted at missing values."""
    d, command = "", "M"
    for value, axis in zip(values, axes, strict=True):
        if value is None:
            command = "M"
        else:
            d += command + svg.place(axis.x, axis.at(value))
            command = "L"
    title = svg.element("title", lines.labels[trial])
    return svg.of_line(trial, title, name="path", class_=f"curve {lines.classes[trial]}", d=d)


def _drawn(axis: _Axis) -> Iterator[Markup]:
    yield svg.line(axis.x, TOP, axis.x, HEIGHT - BOTTOM, "axis")
    yield svg.text(axis.x, TOP - 16, cut(axis.name, LONGEST_LABEL), "label", "middle")
    for y, label in axis.labels:
        yield svg.line(axis.x - 3, y, axis.x + 3, y, "axis")
        yield svg.text(axis.x + 7, y + 3.5, cut(label, LONGEST_LABEL), "halo")


def importance_bars(importances: Sequence[Mapping[str, Any]]) -> Markup:
    """Return a bar for each hyperparameter, with a mark at the value that chance alone reaches."""
    rows = [part for row, importance in enumerate(importances) for part in _importance(row, importance)]
    said = "; ".join(f"{its['name']} {percent(its['share'])}" for its in importances)
    return svg.picture(WIDTH, ROW * len(importances) + 4, f"Importance: {said}", rows, "picture wide")


def _importance(row: int, its: Mapping[str, Any]) -> Iterator[Markup]:
    y, room = row * ROW + 4, WIDTH - BARS_LEFT - BARS_RIGHT
    is_more = its["share"] > its["by_chance"]
    tip = svg.element("title", f"{its['name']}: {percent(its['share'])}, by chance up to {percent(its['by_chance'])}")
    yield svg.text(BARS_LEFT - 8, y + 14, its["name"], anchor="end")
    bar = {"x": BARS_LEFT, "y": y, "width": max(its["share"] * room, 1.0), "height": ROW - 8.0}
    yield svg.element("rect", tip, class_="share" if is_more else "share chance", **bar)
    chance = BARS_LEFT + its["by_chance"] * room
    yield svg.line(chance, y - 3, chance, y + ROW - 5, "mark")
    yield svg.text(max(BARS_LEFT + its["share"] * room, chance) + 6, y + 14, percent(its["share"]))
