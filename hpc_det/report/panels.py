"""Panels of curves: one for each metric, with a line for each trial of one or several experiments.

`variables_of` has what the templates of both pages show of their trials.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpc_det.report.pictures.curves import Line, Lines, Point, curves
from hpc_det.view.formatting import cut, settings
from hpc_det.view.trials import differing, flattened

Record = Mapping[str, Any]
MOST_PANELS = 24
"""Largest number of metrics with a panel of curves; the page names the others."""
POINTS = 120_000
"""Approximate number of points of all learning curves of a page together; each curve has an equal share."""
CROWD = 100
"""Number of trials above which lines are thin and pale, so that dense areas remain visible, and have short tooltips."""
MOST_OF_A_CURVE = 400
"""Largest number of points of a curve; a panel has about as many pixels."""
FEWEST_OF_A_CURVE = 8
"""Number of points that a curve may always have, even if all curves together then exceed POINTS."""
MOST_IN_LEGEND = 12
"""Largest number of lines that a legend names one by one."""
LONGEST_LABEL = 200
"""Characters of the hyperparameters of a line in its tooltip."""

Panel = tuple[str, dict[Line, Sequence[Point]]]
"""A title, and the curve of each trial that has one."""


def variables_of(trials: Mapping[Line, Record], metrics: Sequence[str], lines: Lines) -> dict[str, Any]:
    """Return the variables of a template for the panels and the table of these trials.

    `metrics`: the searchers' metrics, whose panels are first.
    """
    panels = metric_panels(trials, metrics)
    most = most_points(len(panels), len(trials))
    return {
        "panels": [drawn(panel, lines, most) for panel in panels[:MOST_PANELS]],
        "panels_left_out": panels[MOST_PANELS:],
        "most_points": most,
        "speed": [drawn(panel, lines, most) for panel in speed_panels(trials)],
        "is_crowded": len(trials) > CROWD,
        "values": {line: value_of(trial) for line, trial in trials.items()},
        "hparams": {line: flattened(trial["hyperparameters"]) for line, trial in trials.items()},
    }


def most_points(panels: int, lines: int) -> int:
    """Return the largest number of points of each curve."""
    share = POINTS // max(min(panels, MOST_PANELS) * lines, 1)
    return min(max(share, FEWEST_OF_A_CURVE), MOST_OF_A_CURVE)


def metric_panels(trials: Mapping[Line, Record], first: Sequence[str]) -> list[Panel]:
    """Return the panels: validations of the metrics `first`, then other validations, then training."""
    found: list[Panel] = []
    for kind in ("validation", "training"):
        for name in dict.fromkeys(name for trial in trials.values() for name in trial[kind]):
            by_line = {line: trial[kind][name] for line, trial in trials.items() if name in trial[kind]}
            found.append((f"{kind}: {name}", by_line))
    leading = [f"validation: {metric}" for metric in first]
    return sorted(found, key=lambda panel: panel[0] not in leading)


def speed_panels(trials: Mapping[Line, Record]) -> Iterator[Panel]:
    """Yield the panels of speeds and pauses, which need no profile."""
    speeds = {line: trial["batches_per_s"] for line, trial in trials.items()}
    validations = {line: trial["validation_s"] for line, trial in trials.items()}
    saves = {line: [(save["batches"], save["stall_s"]) for save in trial["saves"]] for line, trial in trials.items()}
    for title, by_line in (
        ("training: batches per second", speeds),
        ("a validation: seconds", validations),
        ("a save: seconds without training", saves),
    ):
        if known := {line: curve for line, curve in by_line.items() if curve}:
            yield title, known


def drawn(panel: Panel, lines: Lines, most: int) -> dict[str, Any]:
    """Return the title and the picture of a panel."""
    title, by_line = panel
    return {"title": title, "svg": curves(title, lines.in_order(by_line), lines, most)}


def labels(names: Mapping[Line, str], trials: Mapping[Line, Record]) -> dict[Line, str]:
    """Return for each line its name with the hyperparameters of its trial, for a tooltip."""
    if len(trials) > CROWD:
        return dict(names)
    return {line: _label(names[line], flattened(trial["hyperparameters"])) for line, trial in trials.items()}


def legend(names: Mapping[Line, str], trials: Mapping[Line, Record], lines: Lines) -> list[tuple[Line, str, str]]:
    """Return for each line its CSS classes, and its name with the hyperparameters in which the trials differ.

    The lines are in the order of `names`. Empty for a single line, and for too many.
    """
    if not 1 < len(trials) <= MOST_IN_LEGEND:
        return []
    shown = differing([trial["hyperparameters"] for trial in trials.values()])
    flat = {line: flattened(trial["hyperparameters"]) for line, trial in trials.items()}
    values = {line: {name: its[name] for name in shown if name in its} for line, its in flat.items()}
    return [(line, lines.classes[line], _label(name, values[line])) for line, name in names.items()]


def _label(name: str, hyperparameters: Mapping[str, Any]) -> str:
    return f"{name}: {cut(settings(hyperparameters), LONGEST_LABEL)}" if hyperparameters else name


def value_of(trial: Record) -> float | None:
    """Return the best validation by the searcher's metric, or the search's value; None if it is not a finite number."""
    value = trial["best"]["value"] if trial["best"] else trial["reported"]
    return value if isinstance(value, (int, float)) else None
