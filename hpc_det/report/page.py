"""The facts of an experiment as one HTML page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from hpc_det.report.document import document
from hpc_det.report.importance import FEWEST_TRIALS
from hpc_det.report.panels import labels, legend, value_of, variables_of
from hpc_det.report.pictures.curves import Line, Lines, band, stack
from hpc_det.report.pictures.hyperparameters import MOST_AXES, importance_bars, parallel
from hpc_det.report.pictures.rung_diagram import rung_diagram
from hpc_det.report.pictures.time_line import time_bar, time_line
from hpc_det.report.spans import Phase
from hpc_det.view.performance.timings import Part
from hpc_det.view.trials import flattened

Record = Mapping[str, Any]
COLOURS = 7
"""Number of colour classes in page.css, from v0 for the best trials to v6 for the worst. Unknown values have vx."""


def page(facts: Record, refresh_s: float | None = None) -> str:
    """Return the text of the HTML file.

    `facts`: the result of `facts.facts`. `refresh_s`: seconds between two reloads by the page's script; None: none.
    """
    return document("page.html.j2", {"facts": facts, "now": facts["now"], **_context(facts)}, refresh_s)


def _context(facts: Record) -> dict[str, Any]:
    """Return the variables of page.html.j2 that are computed from the facts."""
    searcher, trials = facts["searcher"], facts["trials"]
    best = facts["best"]["trial"] if facts["best"] else None
    by_line: dict[Line, Record] = {trial["id"]: trial for trial in trials}
    lines = lines_of(by_line, smaller_is_better=searcher["smaller_is_better"], best=best)
    important = facts["importance"]["names"] if facts["importance"] else []
    allocated = {phase: amount for phase, amount in facts["seconds"].items() if Phase(phase).has_slots}
    return {
        "colours": range(COLOURS),
        **variables_of(by_line, [searcher["metric"]], lines),
        "legend_lines": legend({line: f"trial {line}" for line in reversed(lines.classes)}, by_line, lines),
        "parallel": _parallel(facts, lines),
        "most_axes": MOST_AXES,
        "importance": importance_bars(important) if important else None,
        "fewest_trials": FEWEST_TRIALS,
        "rungs": [rung_diagram(bracket["rungs"], facts["unit"], lines.classes) for bracket in facts["brackets"]],
        "time_line": time_line(trials) if any(trial["spans"] for trial in trials) else None,
        "time_bar": time_bar("slots", allocated) if allocated else None,
        "allocated": allocated,
        "phases": list(facts["seconds"]),
        "time_parts": [part.value for part in Part],
        "part_bars": {
            trial["id"]: time_bar(f"trial {trial['id']}", trial["profile"]["parts"])
            for trial in trials
            if trial["profile"] and trial["profile"]["parts"]
        },
        "course": _course(facts["course"]) if facts["course"] else None,
        "best_trial": best,
        "written": [row for row in facts["config"] if row["origin"] != "default"],
        "defaults": [row for row in facts["config"] if row["origin"] == "default"],
    }


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


def _parallel(facts: Record, lines: Lines) -> Markup | None:
    """Return parallel coordinates of the trials with a value of the searcher's metric; None with fewer than two."""
    names = facts["hyperparameters"][:MOST_AXES]
    points: dict[Line, list[Any]] = {
        trial["id"]: [*map(flattened(trial["hyperparameters"]).get, names), value_of(trial)]
        for trial in facts["trials"]
        if value_of(trial) is not None
    }
    if not names or len(points) < 2:
        return None
    metric = facts["searcher"]["metric"]
    return parallel(lines.in_order(points), [*names, metric], {*facts["logarithmic"], metric}, lines)


# --- lines


def lines_of(trials: Mapping[Line, Record], *, smaller_is_better: bool, best: int | None) -> Lines:
    """Return the lines of these trials: the rank of a trial among all decides its colour, and the best is on top.

    `best`: the trial that is highlighted, if any.
    """
    sign = 1 if smaller_is_better else -1
    values = {line: value_of(trial) for line, trial in trials.items()}
    known = sorted((sign * value, line) for line, value in values.items() if value is not None and line != best)
    classes = {line: "vx" for line, value in values.items() if value is None}
    for place in reversed(range(len(known))):
        classes[known[place][1]] = f"v{place * COLOURS // len(known)}"
    if best is not None and best in values:
        classes.pop(best, None)
        classes[best] = "v0 best"
    return Lines(classes, labels({line: f"trial {line}" for line in trials}, trials))
