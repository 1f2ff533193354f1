"""How a metric of all nodes or GPUs went over the batches: its mean, and between which values all of it lay."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from hpc_det.report.pictures import svg
from hpc_det.report.pictures.curves import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, axes, path
from hpc_det.report.pictures.svg import Scale
from hpc_det.view.formatting import number

Point = tuple[int, float, float, float]
"""Batches, and the mean, the lowest and the highest value there."""


def band(title: str, points: Sequence[Point], size: float = 1.0) -> Markup:
    """Of at least one point. Values are shown as multiples of `size`."""
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
