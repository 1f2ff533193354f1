"""What the time of a rank went into, over its batches: a column for each stretch, its parts one above the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from hpc_det.report.pictures import svg
from hpc_det.report.pictures.curves import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, axes
from hpc_det.report.pictures.scale import Scale
from hpc_det.view.formatting import percent

Column = Mapping[str, Any]
"""first, last: batches; seconds: of each part."""


def stack(columns: Sequence[Column]) -> Markup:
    """In percent. At least one column; all have the same parts."""
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
    return svg.picture(WIDTH, HEIGHT, f"Share of the time against batches: {_told(columns)}", [*axes(x, y), *parts])


def _box(left: float, bottom: float, right: float, top: float) -> str:
    """Nothing for what is too low to see."""
    return f"M{svg.place(left, bottom)}V{top:.1f}H{right:.1f}V{bottom:.1f}Z" if bottom - top >= 0.05 else ""


def _told(columns: Sequence[Column]) -> str:
    whole = sum(sum(column["seconds"].values()) for column in columns) or 1.0
    names = columns[0]["seconds"]
    shares = {part: sum(column["seconds"][part] for column in columns) / whole for part in names}
    return ", ".join(f"{part} {percent(share)}" for part, share in shares.items())
