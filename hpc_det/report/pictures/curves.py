"""Pictures over batches: a metric of all trials, the parts of a rank's time, the load of nodes or GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from markupsafe import Markup

from hpc_det.errors import count
from hpc_det.report.pictures import svg
from hpc_det.report.pictures.svg import Scale
from hpc_det.view.formatting import number, percent

WIDTH, HEIGHT = 480, 280
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 12, 36
Point = tuple[float, float | None]
Line = int | str
"""Identifier of a line: a trial such as 3 or, among several experiments, 12/3."""
Thing = TypeVar("Thing")


@dataclass(frozen=True)
class Lines:
    """The style of the lines, the same in every picture of a page."""

    classes: dict[Line, str]
    """CSS classes of each line, in drawing order: the last one is on top."""
    labels: Mapping[Line, str]
    """The tooltip of each line."""

    def in_order(self, by_line: Mapping[Line, Thing]) -> dict[Line, Thing]:
        """Return the items in drawing order."""
        return {line: by_line[line] for line in self.classes if line in by_line}


def curves(title: str, by_line: Mapping[Line, Sequence[Point]], lines: Lines, most_points: int) -> Markup:
    """Return a panel of curves, which page.js can smooth.

    `by_line`: the points of each line, of which at least one has a value; the last line is drawn on top.
    `most_points`: largest number of points of each curve.
    """
    values = [value for curve in by_line.values() for _, value in curve if value is not None]
    x = Scale.of([at for curve in by_line.values() for at, _ in curve], LEFT, WIDTH - RIGHT, may_be_log=False)
    y = Scale.of(values, HEIGHT - BOTTOM, TOP)
    drawn = (_curve(line, curve, lines, x, y, most_points) for line, curve in by_line.items())
    counted = count(len(by_line), "trial")
    said = f"{title} of {counted} against batches, from {number(min(values))} to {number(max(values))}"
    # page.js smooths values, so it needs the scale of an axis on which pixels are not proportional to them
    log = f"{y.low!r} {y.high!r} {y.begin} {y.end}" if y.is_log else None
    return svg.picture(WIDTH, HEIGHT, said, [*axes(x, y), *drawn], "picture lines", data_log=log)


def axes(x: Scale, y: Scale) -> Iterator[Markup]:
    """Yield the axes of a picture over batches."""
    for tick in y.ticks():
        yield svg.line(LEFT, y.at(tick), WIDTH - RIGHT, y.at(tick), "grid")
        yield svg.text(LEFT - 6, y.at(tick) + 3.5, number(tick), anchor="end")
    for tick in x.ticks(6):
        yield svg.text(x.at(tick), HEIGHT - BOTTOM + 15, number(tick), anchor="middle")
    yield svg.line(LEFT, HEIGHT - BOTTOM, WIDTH - RIGHT, HEIGHT - BOTTOM, "axis")
    yield svg.text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, "batches", "label", "middle")


def _curve(line: Line, curve: Sequence[Point], lines: Lines, x: Scale, y: Scale, most: int) -> Markup:
    stretches = [thinned(stretch, most) for stretch in unbroken(curve)]
    d = "".join(path([(x.at(at), y.at(value)) for at, value in stretch]) for stretch in stretches)
    title = svg.element("title", lines.labels[line])
    return svg.of_line(line, title, name="path", class_=f"curve {lines.classes[line]}", d=d)


def path(points: Sequence[tuple[float, float]]) -> str:
    """Return the `d` attribute of a path through these pixels; a single point becomes a small circle."""
    if len(points) == 1:
        x, y = points[0]
        return f"M{svg.place(x - 2, y)}a2,2 0 1,0 4,0a2,2 0 1,0 -4,0"
    return f"M{' '.join(svg.place(*point) for point in points)}"


def unbroken(curve: Sequence[Point]) -> Iterator[list[tuple[float, float]]]:
    """Yield the points between gaps: values of None, which were not finite numbers."""
    stretch: list[tuple[float, float]] = []
    for at, value in curve:
        if value is not None:
            stretch.append((at, value))
        elif stretch:
            yield stretch
            stretch = []
    if stretch:
        yield stretch


def thinned(curve: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Return about `most` points: both ends, and the lowest and highest of equal parts, so that no peak is lost."""
    if len(curve) <= most:
        return list(curve)
    parts = max((most - 2) // 2, 1)
    inner = curve[1:-1]
    kept = [curve[0]]
    for part in range(parts):
        points = inner[part * len(inner) // parts : (part + 1) * len(inner) // parts]
        ends = {min(points, key=lambda point: point[1]), max(points, key=lambda point: point[1])}
        kept += sorted(ends)
    return [*kept, curve[-1]]


Column = Mapping[str, Any]
"""The batches from `first` to `last`, and the `seconds` of each part of the time."""


def stack(columns: Sequence[Column]) -> Markup:
    """Return the shares of the time as stacked areas. There is at least one column, and all have the same parts."""
    x = Scale.of([columns[0]["first"], *(column["last"] for column in columns)], LEFT, WIDTH - RIGHT, may_be_log=False)
    y = Scale.of([0.0, 100.0], HEIGHT - BOTTOM, TOP, may_be_log=False)
    drawn: dict[str, str] = {}
    for column in columns:
        below, whole = 0.0, sum(column["seconds"].values()) or 1.0
        for part, seconds in column["seconds"].items():
            above = below + 100 * seconds / whole
            drawn[part] = drawn.get(part, "") + _box(
                x.at(column["first"]), y.at(below), x.at(column["last"]), y.at(above)
            )
            below = above
    parts = (svg.element("path", svg.element("title", part), class_=f"fill p-{part}", d=d) for part, d in drawn.items())
    return svg.picture(WIDTH, HEIGHT, f"Share of the time against batches: {_shares(columns)}", [*axes(x, y), *parts])


def _box(left: float, bottom: float, right: float, top: float) -> str:
    """Return the path of a box; "" if it is too low to be visible."""
    return f"M{svg.place(left, bottom)}V{top:.1f}H{right:.1f}V{bottom:.1f}Z" if bottom - top >= 0.05 else ""


def _shares(columns: Sequence[Column]) -> str:
    whole = sum(sum(column["seconds"].values()) for column in columns) or 1.0
    names = columns[0]["seconds"]
    shares = {part: sum(column["seconds"][part] for column in columns) / whole for part in names}
    return ", ".join(f"{part} {percent(share)}" for part, share in shares.items())


Range = tuple[int, float, float, float]
"""Batches, and the mean, lowest and highest value there."""


def band(title: str, points: Sequence[Range], size: float = 1.0) -> Markup:
    """Return the mean as a line, in a band from the lowest to the highest value, of at least one point.

    Values are shown as multiples of `size`.
    """
    points = [(at, mean / size, low / size, high / size) for at, mean, low, high in points]
    lows, highs = [low for *_, low, _ in points], [high for *_, high in points]
    x = Scale.of([at for at, *_ in points], LEFT, WIDTH - RIGHT, may_be_log=False)
    y = Scale.of([0.0, *lows, *highs], HEIGHT - BOTTOM, TOP, may_be_log=False)
    outline = [(x.at(at), y.at(high)) for at, _, _, high in points]
    outline += [(x.at(at), y.at(low)) for at, _, low, _ in reversed(points)]
    area = svg.element("path", class_="fill range", d=f"{path(outline)}Z")
    line = svg.element("path", class_="curve usage", d=path([(x.at(at), y.at(mean)) for at, mean, *_ in points]))
    said = f"{title} against batches, from {number(min(lows))} to {number(max(highs))}"
    return svg.picture(WIDTH, HEIGHT, said, [*axes(x, y), area, line])
