"""The facts of an experiment as one self-contained HTML page, which needs no server and no network.

A Content-Security-Policy with the hashes of the inline script and styles allows nothing else to run.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from hpc_det.report.importance import FEWEST_TRIALS
from hpc_det.report.pictures.curves import Point, band, curves, stack
from hpc_det.report.pictures.hyperparameters import MOST_AXES, importance_bars, parallel
from hpc_det.report.pictures.rung_diagram import rung_diagram
from hpc_det.report.pictures.time_line import time_bar, time_line
from hpc_det.report.spans import Phase
from hpc_det.view.formatting import date_and_time, duration, number, percent
from hpc_det.view.performance.timings import Part
from hpc_det.view.trials import flattened

Record = Mapping[str, Any]
Thing = TypeVar("Thing")
COLOURS = 7
"""Number of colour classes in page.css, from v0 for the best trials to v6 for the worst. Unknown values have vx."""
HERE = Path(__file__).parent
MOST_PANELS = 24
"""Largest number of metrics with a panel of curves; the page names the others."""
POINTS = 120_000
"""Approximate number of points of all learning curves of a page together; each curve has an equal share."""
CROWD = 100
"""Number of trials above which lines are thin and pale, so that dense areas remain visible."""
MOST_OF_A_CURVE = 400
"""Largest number of points of a curve; a panel has about as many pixels."""
FEWEST_OF_A_CURVE = 8
"""Number of points that a curve may always have, even if all curves together then exceed POINTS."""


def page(facts: Record) -> str:
    """Return the text of the HTML file. `facts`: the result of `facts.facts`."""
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"number": number, "duration": duration, "percent": percent}
    environment.filters |= {"moment": date_and_time, "json": json.dumps}
    style, script = ((HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    return environment.get_template("page.html.j2").render(
        facts=facts,
        style=Markup(style),
        script=Markup(script),
        style_hash=_hash(style),
        script_hash=_hash(script),
        **_context(facts),
    )


def _hash(text: str) -> str:
    """Return the hash of an inline script or style, as a Content-Security-Policy names it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _context(facts: Record) -> dict[str, Any]:
    """Return the variables of page.html.j2 that are computed from the facts."""
    searcher, trials = facts["searcher"], facts["trials"]
    best = facts["best"]["trial"] if facts["best"] else None
    colours = Colours.of(trials, smaller_is_better=searcher["smaller_is_better"], best=best)
    panels = list(_panels(trials, searcher["metric"]))
    important = facts["importance"]["names"] if facts["importance"] else []
    most_points = _most_points(len(panels), len(trials))
    allocated = {phase: amount for phase, amount in facts["seconds"].items() if Phase(phase).has_slots}
    return {
        "colours": range(COLOURS),
        "panels": [_panel(panel, colours, most_points) for panel in panels[:MOST_PANELS]],
        "panels_left_out": panels[MOST_PANELS:],
        "most_points": most_points,
        "parallel": _parallel(facts, colours),
        "most_axes": MOST_AXES,
        "importance": importance_bars(important) if important else None,
        "fewest_trials": FEWEST_TRIALS,
        "rungs": [rung_diagram(bracket["rungs"], facts["unit"], colours.classes) for bracket in facts["brackets"]],
        "time_line": time_line(trials) if any(trial["spans"] for trial in trials) else None,
        "time_bar": time_bar("slots", allocated) if allocated else None,
        "allocated": allocated,
        "phases": list(facts["seconds"]),
        "profile": [_panel(panel, colours, most_points) for panel in _profile(trials)],
        "parts": [part.value for part in Part],
        "part_bars": {
            trial["id"]: time_bar(f"trial {trial['id']}", trial["profile"]["parts"])
            for trial in trials
            if trial["profile"] and trial["profile"]["parts"]
        },
        "course": _course(facts["course"]) if facts["course"] else None,
        "best_trial": best,
        "is_crowded": len(trials) > CROWD,
        "values": {trial["id"]: value_of(trial) for trial in trials},
        "hparams": {trial["id"]: flattened(trial["hyperparameters"]) for trial in trials},
        "written": [row for row in facts["config"] if row["origin"] != "default"],
        "defaults": [row for row in facts["config"] if row["origin"] == "default"],
    }


def _most_points(panels: int, trials: int) -> int:
    """Return the largest number of points of each curve."""
    share = POINTS // max(min(panels, MOST_PANELS) * trials, 1)
    return min(max(share, FEWEST_OF_A_CURVE), MOST_OF_A_CURVE)


Panel = tuple[str, dict[int, Sequence[Point]]]
"""A title, and the curve of each trial that has one, keyed by trial."""


def _panels(trials: Sequence[Record], metric: str) -> Iterator[Panel]:
    """Yield the panels: the searcher's metric first, then validation, then training."""
    found: list[Panel] = []
    for kind in ("validation", "training"):
        names = dict.fromkeys(name for trial in trials for name in trial[kind])
        for name in names:
            by_trial = {trial["id"]: trial[kind][name] for trial in trials if name in trial[kind]}
            found.append((f"{kind}: {name}", by_trial))
    yield from sorted(found, key=lambda panel: panel[0] != f"validation: {metric}")


def _profile(trials: Sequence[Record]) -> Iterator[Panel]:
    """Yield the panels of speeds and pauses, which need no profile."""
    speeds = {trial["id"]: trial["batches_per_s"] for trial in trials}
    validations = {trial["id"]: trial["validation_s"] for trial in trials}
    saves = {trial["id"]: [(save["batches"], save["stall_s"]) for save in trial["saves"]] for trial in trials}
    for title, by_trial in (
        ("training: batches per second", speeds),
        ("a validation: seconds", validations),
        ("a save: seconds without training", saves),
    ):
        if known := {trial: curve for trial, curve in by_trial.items() if curve}:
            yield title, known


GIB, MIB = 2**30, 2**20
_SYSTEM = {
    "gpu_util": ("GPUs: busy, %", 1),
    "gpu_memory_free": ("GPUs: free memory, GiB", GIB),
    "cpu_util": ("cores: busy, %", 1),
    "memory_free": ("nodes: free memory, GiB", GIB),
    "disk_iops": ("disks: operations a second", 1),
    "disk_read": ("disks: read, MiB a second", MIB),
    "disk_write": ("disks: written, MiB a second", MIB),
    "net_sent": ("network: sent, MiB a second", MIB),
    "net_received": ("network: received, MiB a second", MIB),
}
"""For each system metric, its title and the size of the unit in which it is shown."""


def _course(course: Record) -> dict[str, Any]:
    pictures = [{"title": "share of the time, %", "svg": stack(course["columns"])}]
    for name, (title, size) in _SYSTEM.items():
        if points := course["system"].get(name):
            pictures.append({"title": title, "svg": band(title, points, size)})
    return {"trial": course["trial"], "rank": course["rank"], "host": course["host"], "pictures": pictures}


def _panel(panel: Panel, colours: Colours, most_points: int) -> dict[str, Any]:
    title, by_trial = panel
    return {"title": title, "svg": curves(title, colours.in_order(by_trial), colours.classes, most_points)}


def _parallel(facts: Record, colours: Colours) -> Markup | None:
    """Return parallel coordinates of the trials with a value of the searcher's metric; None with fewer than two."""
    names = facts["hyperparameters"][:MOST_AXES]
    points = {
        trial["id"]: [*map(flattened(trial["hyperparameters"]).get, names), value_of(trial)]
        for trial in facts["trials"]
        if value_of(trial) is not None
    }
    if not names or len(points) < 2:
        return None
    metric = facts["searcher"]["metric"]
    return parallel(colours.in_order(points), [*names, metric], {*facts["logarithmic"], metric}, colours.classes)


# --- colours


@dataclass(frozen=True)
class Colours:
    """The colour of each trial: its rank among all trials decides it, and it is the same in every picture."""

    classes: dict[int, str]
    """CSS class of each trial, in drawing order: the best trial is last, so that it is on top."""
    best: int | None
    """The trial that is highlighted, if any."""

    @classmethod
    def of(cls, trials: Sequence[Record], *, smaller_is_better: bool, best: int | None) -> Colours:
        """Return the colours of these trials."""
        sign = 1 if smaller_is_better else -1
        values = {trial["id"]: value_of(trial) for trial in trials}
        known = sorted((sign * value, trial) for trial, value in values.items() if value is not None and trial != best)
        classes = {trial: "vx" for trial, value in values.items() if value is None}
        for place in reversed(range(len(known))):
            classes[known[place][1]] = f"v{place * COLOURS // len(known)}"
        if best in values:
            classes.pop(best, None)
            classes[best] = "v0 best"
        return cls(classes, best)

    def in_order(self, by_trial: Mapping[int, Thing]) -> dict[int, Thing]:
        """Return the items in drawing order, the best trial last."""
        return {trial: by_trial[trial] for trial in self.classes if trial in by_trial}


def value_of(trial: Record) -> float | None:
    """Return the best validation by the searcher's metric, or the search's value; None if it is not a finite number."""
    value = trial["best"]["value"] if trial["best"] else trial["reported"]
    return value if isinstance(value, (int, float)) else None
