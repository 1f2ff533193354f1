"""The facts of several experiments as one HTML page: results, overlaid curves, and the settings that differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpc_det.report.document import document
from hpc_det.report.panels import labels, legend, variables_of
from hpc_det.report.pictures.curves import Line, Lines
from hpc_det.report.pictures.time_line import time_bar
from hpc_det.report.spans import Phase
from hpc_det.view.formatting import NONE, number, setting
from hpc_det.view.trials import differing, flattened

Record = Mapping[str, Any]
COLOURS = 8
"""Number of colour classes in page.css, from e0 for the first experiment. Later experiments have dashed lines."""
NOT_COMPARED = ("name", "description", "labels", "hyperparameters")
"""Sections of the configuration without a row in the table of differences: the page shows them elsewhere."""
MOST_SPELLED = 6
"""Largest number of values of a hyperparameter that a cell lists."""


def comparison(experiments: Sequence[Record], refresh_s: float | None = None) -> str:
    """Return the text of the HTML file.

    `experiments`: for each experiment, the result of `facts.facts`. `refresh_s`: seconds between two reloads by the
    page's script; None: none.
    """
    return document("comparison.html.j2", _context(experiments), refresh_s)


def _context(experiments: Sequence[Record]) -> dict[str, Any]:
    """Return the variables of comparison.html.j2."""
    by_experiment = [
        (facts, {line_of(facts, trial["id"]): trial for trial in facts["trials"]}) for facts in experiments
    ]
    trials: dict[Line, Record] = {line: trial for _, its in by_experiment for line, trial in its.items()}
    lines = lines_of(experiments, trials)
    metrics = list(dict.fromkeys(facts["searcher"]["metric"] for facts in experiments))
    best = winners(experiments)
    columns = [_column(place, facts, is_winner=place in best) for place, facts in enumerate(experiments)]
    return {
        "now": max(facts["now"] for facts in experiments),
        "experiments": columns,
        **variables_of(trials, metrics, lines),
        "legend_lines": legend(line_names(experiments), trials, lines),
        "hyperparameters": sorted(hyperparameter_rows(experiments), key=lambda row: not row["differs"]),
        "settings": [*setting_rows(experiments)],
        "phases": list(dict.fromkeys(phase for column in columns for phase in column["seconds"])),
        "trials": trials,
        "trial_hyperparameters": differing([trial["hyperparameters"] for trial in trials.values()]) if trials else [],
        "metric_of": {line: facts["searcher"]["metric"] for facts, its in by_experiment for line in its},
        "metrics": metrics,
    }


def _column(place: int, facts: Record, *, is_winner: bool) -> Record:
    """Return what the page shows of one experiment besides its facts."""
    seconds = {phase: amount for phase, amount in facts["seconds"].items() if Phase(phase).has_slots}
    return {
        "facts": facts,
        "colour": _colour(place),
        "best_line": _best_line(facts),
        "is_winner": is_winner,
        "seconds": seconds,
        "slot_seconds": sum(seconds.values()) * facts["slots"],
        "bar": time_bar(f"experiment {facts['named']}", seconds) if seconds else None,
    }


def line_of(facts: Record, trial: int) -> Line:
    """Return the line of a trial, such as 12/3."""
    return f"{facts['named']}/{trial}"


def _best_line(facts: Record) -> Line | None:
    """Return the line of the best trial; that of the only trial before its first validation."""
    if facts["best"]:
        return line_of(facts, facts["best"]["trial"])
    return line_of(facts, facts["trials"][0]["id"]) if len(facts["trials"]) == 1 else None


def _colour(place: int) -> str:
    return f"e{place % COLOURS}" + (" dashed" if place >= COLOURS else "")


def lines_of(experiments: Sequence[Record], trials: Mapping[Line, Record]) -> Lines:
    """Return the lines of all trials: each experiment has a colour, and its best trial is on top of the others."""
    others: dict[Line, str] = {}
    best: dict[Line, str] = {}
    for place, facts in enumerate(experiments):
        for trial in facts["trials"]:
            line = line_of(facts, trial["id"])
            if line == _best_line(facts):
                best[line] = f"{_colour(place)} best"
            else:
                others[line] = f"{_colour(place)} thin"
    return Lines({**others, **best}, labels(line_names(experiments), trials))


def line_names(experiments: Sequence[Record]) -> dict[Line, str]:
    """Return the name of each line, such as "12/3 digits"."""
    return {
        (line := line_of(facts, trial["id"])): f"{line} {facts['name']}"
        for facts in experiments
        for trial in facts["trials"]
    }


def winners(experiments: Sequence[Record]) -> list[int]:
    """Return the places of the experiments with the best value; empty if they do not have one metric in common."""
    searchers = {(facts["searcher"]["metric"], facts["searcher"]["smaller_is_better"]) for facts in experiments}
    values = {
        place: facts["best"]["value"]
        for place, facts in enumerate(experiments)
        if facts["best"] and isinstance(facts["best"]["value"], (int, float))
    }
    if len(searchers) != 1 or not values:
        return []
    ((_, smaller_is_better),) = searchers
    best = min(values.values()) if smaller_is_better else max(values.values())
    return [place for place, value in values.items() if value == best]


def hyperparameter_rows(experiments: Sequence[Record]) -> Iterator[Record]:
    """Yield {"name", "values", "differs"} for each hyperparameter; `values` has a text for each experiment."""
    flat = [[flattened(trial["hyperparameters"]) for trial in facts["trials"]] for facts in experiments]
    for name in sorted({name for its in flat for trial in its for name in trial}):
        values = [_values([trial.get(name) for trial in its]) for its in flat]
        known = {text for text, its in zip(values, flat, strict=True) if its}  # one without trials has no values yet
        yield {"name": name, "values": values, "differs": len(known) > 1}


def _values(values: Sequence[Any]) -> str:
    """Return the values of a hyperparameter in the trials of one experiment: one value, a list or a range."""
    found = list(dict.fromkeys(setting(value) for value in values if value is not None))
    numbers = [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
    if len(found) > MOST_SPELLED and len(numbers) == len(values):
        return f"{number(min(numbers))} to {number(max(numbers))}"
    more = f" and {len(found) - MOST_SPELLED} more" if len(found) > MOST_SPELLED else ""
    return ", ".join(found[:MOST_SPELLED]) + more or NONE


def setting_rows(experiments: Sequence[Record]) -> Iterator[Record]:
    """Yield {"name", "values", "differs"} for each other setting that is not the same in all experiments."""
    configs = [{row["key"]: row["value"] for row in facts["config"]} for facts in experiments]
    for key in dict.fromkeys(key for config in configs for key in config):
        values = [setting(config[key]) if key in config else NONE for config in configs]
        if key.partition(".")[0] not in NOT_COMPARED and len(set(values)) > 1:
            yield {"name": key, "values": values, "differs": False}  # all rows of this table do: none is highlighted
