"""Shares as bars: how important hyperparameters are, and what the time of slots went into."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from hpc_det.report.pictures import svg
from hpc_det.view.formatting import duration, percent

WIDTH, LEFT, RIGHT, ROW = 1000, 190, 60, 26


def importance_bars(importances: Sequence[Mapping[str, Any]]) -> Markup:
    """A bar for each hyperparameter, and a mark at what chance alone would reach."""
    rows = [part for row, importance in enumerate(importances) for part in _importance(row, importance)]
    said = "; ".join(f"{its['name']} {percent(its['share'])}" for its in importances)
    return svg.picture(WIDTH, ROW * len(importances) + 4, f"Importance: {said}", rows, "picture wide")


def _importance(row: int, its: Mapping[str, Any]) -> Iterator[Markup]:
    y, room = row * ROW + 4, WIDTH - LEFT - RIGHT
    is_more = its["share"] > its["by_chance"]
    tip = svg.element("title", f"{its['name']}: {percent(its['share'])}, by chance up to {percent(its['by_chance'])}")
    yield svg.text(LEFT - 8, y + 14, its["name"], anchor="end")
    bar = {"x": LEFT, "y": y, "width": max(its["share"] * room, 1.0), "height": ROW - 8.0}
    yield svg.element("rect", tip, class_="share" if is_more else "share chance", **bar)
    chance = LEFT + its["by_chance"] * room
    yield svg.line(chance, y - 3, chance, y + ROW - 5, "mark")
    yield svg.text(max(LEFT + its["share"] * room, chance) + 6, y + 14, percent(its["share"]))


def time_bar(whose: str, seconds: Mapping[str, float]) -> Markup:
    """Its time, by phase or part in this order, which page.css has a colour for."""
    total, x = sum(seconds.values()) or 1.0, 0.0
    parts = []
    for phase, amount in seconds.items():
        width = amount / total * WIDTH
        tip = svg.element("title", f"{phase}: {duration(amount)}, {percent(amount / total)}")
        parts.append(svg.element("rect", tip, x=x, y=0.0, width=width, height=22.0, class_=f"fill p-{phase}"))
        x += width
    said = "; ".join(f"{phase} {percent(amount / total)}" for phase, amount in seconds.items())
    return svg.picture(WIDTH, 22, f"Time of {whose}: {said}", parts, "picture wide")
