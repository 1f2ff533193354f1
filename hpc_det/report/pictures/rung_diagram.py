"""A bracket of successive halving: its rungs from left to right, with the trials of each by value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from markupsafe import Markup

from hpc_det.errors import count, length_in_words
from hpc_det.report.pictures import svg
from hpc_det.report.pictures.curves import Line
from hpc_det.report.pictures.svg import Scale
from hpc_det.view.formatting import number

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 480, 300, 60, 50, 58, 14
Rung = Mapping[str, Any]


def rung_diagram(rungs: Sequence[Rung], unit: str, classes: Mapping[Line, str]) -> Markup:
    """Return the diagram of one bracket, with a dot for each trial at each rung that it reached.

    Dots of promoted and finished trials are filled, others hollow. Lines connect the dots of a trial. `unit`: of the
    rungs' lengths. `classes`: the CSS classes of each trial.
    """
    values = [trial["value"] for rung in rungs for trial in rung["trials"] if trial["value"] is not None]
    y = Scale.of(values, HEIGHT - BOTTOM, TOP)
    step = (WIDTH - LEFT - RIGHT) / max(len(rungs) - 1, 1)
    places = [_places(rung, LEFT + i * step, y) for i, rung in enumerate(rungs)]
    parts = [*_grid(y), *_lines(places, classes)]
    for i, rung in enumerate(rungs):
        parts += [*_heading(rung, LEFT + i * step, unit), *_dots(rung, places[i], classes)]
    said = "; ".join(f"{length_in_words(rung['length'], unit)}: {in_words(rung)}" for rung in rungs)
    return svg.picture(WIDTH, HEIGHT, said, parts)


def in_words(rung: Rung) -> str:
    """Return a text such as `16 trials, 4 promoted, 12 stopped`."""
    statuses = Counter(trial["status"] for trial in rung["trials"])
    return ", ".join(
        [count(len(rung["trials"]), "trial"), *(f"{count} {status}" for status, count in sorted(statuses.items()))]
    )


def _places(rung: Rung, x: float, y: Scale) -> dict[int, tuple[float, float]]:
    """Return the position of each trial of the rung; those without a finite value are at the bottom."""
    ground = float(HEIGHT - BOTTOM)
    return {trial["trial"]: (x, ground if trial["value"] is None else y.at(trial["value"])) for trial in rung["trials"]}


def _grid(y: Scale) -> Iterator[Markup]:
    for tick in y.ticks():
        yield svg.line(LEFT - 12, y.at(tick), WIDTH - RIGHT + 12, y.at(tick), "grid")
        yield svg.text(LEFT - 16, y.at(tick) + 3.5, number(tick), anchor="end")


def _heading(rung: Rung, x: float, unit: str) -> Iterator[Markup]:
    statuses = Counter(trial["status"] for trial in rung["trials"])
    went_on = statuses["promoted"] + statuses["finished"]
    yield svg.text(x, 14.0, length_in_words(rung["length"], unit), "label", "middle")
    yield svg.text(x, 29.0, f"{len(rung['trials'])} reached", anchor="middle")
    word = "finished" if statuses["finished"] else "promoted"
    yield svg.text(x, 43.0, f"{went_on} {word}", anchor="middle")


def _lines(places: Sequence[Mapping[int, tuple[float, float]]], classes: Mapping[Line, str]) -> Iterator[Markup]:
    for lower, upper in pairwise(places):
        for trial in lower.keys() & upper.keys():
            d = f"M{svg.place(*lower[trial])}L{svg.place(*upper[trial])}"
            yield svg.of_line(trial, name="path", class_=f"curve thin {classes[trial]}", d=d)


def _dots(rung: Rung, places: Mapping[int, tuple[float, float]], classes: Mapping[Line, str]) -> Iterator[Markup]:
    for trial in rung["trials"]:
        number_, (x, y) = trial["trial"], places[trial["trial"]]
        value = "no finite value" if trial["value"] is None else number(trial["value"])
        tip = svg.element("title", f"trial {number_}: {value} at {rung['length']}, {trial['status']}")
        class_ = f"dot {classes[number_]} {trial['status']}"
        yield svg.of_line(number_, tip, name="circle", class_=class_, cx=x, cy=y, r=3.6)
