"""hpc-det trial profile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hpc_det.cli.output import Column, Record, rows
from hpc_det.errors import printable
from hpc_det.store.folders import TrialFolder
from hpc_det.view.formatting import NONE, columns, count, duration, length_in_words, number, percent, quantity, section
from hpc_det.view.performance.profile import profile
from hpc_det.view.performance.system import GPU_UNITS, UNITS
from hpc_det.view.state import ExperimentView

SHOWN_DIGITS = 12
"""Of a GPU's UUID: as many tell those of a node apart."""
_TIMINGS = (
    Column("TIMING", lambda timing: timing["timing"]),
    Column("MEAN", lambda timing: duration(timing["mean_s"])),
    Column("SHARE", lambda timing: percent(timing["share"])),
    Column("A BATCH", lambda timing: duration(timing["batch_s"])),
    Column("LONGEST", lambda timing: duration(timing["longest_s"])),
    Column("OF RANK", lambda timing: f"{timing['longest_rank']} on {timing['longest_host']}"),
)
_METRICS = (
    Column("HOST", lambda measure: measure["host"]),
    Column("GPU", lambda measure: (measure["gpu"] or NONE)[:SHOWN_DIGITS]),
    Column("METRIC", lambda measure: measure["measure"]),
    Column("MEAN", lambda measure: quantity(measure["mean"], measure["unit"])),
    Column("MIN", lambda measure: quantity(measure["min"], measure["unit"])),
    Column("MAX", lambda measure: quantity(measure["max"], measure["unit"])),
)
KEYS = "measure unit host gpu mean min max share batch_s rank"
"""Of a measure."""


def of(trial: TrialFolder) -> Record:
    """The record that `--json` prints."""
    return {"id": trial.id, **profile(ExperimentView(trial.experiment()), trial)}


def measures(found: Record) -> list[Record]:
    """A record for each timing and each metric of a node or GPU: a spreadsheet's rows."""
    return [*map(_of_timing, found["timings"]), *_of_nodes(found)]


def _of_timing(timing: Record) -> Record:
    return {
        "measure": timing["timing"],
        "unit": "s",
        "host": timing["longest_host"],
        "gpu": None,
        "mean": timing["mean_s"],
        "min": None,
        "max": timing["longest_s"],
        "share": timing["share"],
        "batch_s": timing["batch_s"],
        "rank": timing["longest_rank"],
    }


def _of_nodes(found: Record) -> Iterator[Record]:
    for node in found["nodes"]:
        yield from _of_metrics(node["host"], None, node["metrics"], UNITS)
        for gpu, metrics in node["gpus"].items():
            yield from _of_metrics(node["host"], gpu, metrics, GPU_UNITS)


def _of_metrics(host: str, gpu: str | None, metrics: Record, units: Mapping[str, str]) -> Iterator[Record]:
    for name, usage in metrics.items():
        about = {"measure": name, "unit": units[name], "host": host, "gpu": gpu}
        yield {**about, **usage, "share": None, "batch_s": None, "rank": None}


def in_words(trial: TrialFolder, found: Record) -> str:
    """The verdict first, and then what it stands on."""
    heading = [f"Trial {trial.experiment().id}/{trial.id}: {found['verdict']}", f"  {found['why']}"]
    also = [section(f"Also {other['verdict']}: {other['why']}", _advice(other)) for other in found["also"]]
    timings = section(_timings_heading(found), _table(found["timings"], _TIMINGS))
    nodes = section("System metrics, of whole nodes", _table(list(_of_nodes(found)), _METRICS))
    parts = [heading, section("To try", _advice(found)), *also, timings, nodes, section("Notes", found["notes"])]
    return "\n\n".join("\n".join(map(printable, lines)) for lines in parts if lines)


def _advice(verdict: Record) -> list[str]:
    return [line for its in verdict["advice"] for line in [f"- {its['text']}", *_setting(its)]]


def _setting(advice: Record) -> list[str]:
    return [f"    {advice['setting']}"] if advice["setting"] else []


def _timings_heading(found: Record) -> str:
    batches, ranks = length_in_words(found["batches"], "batches"), count(found["ranks"], "rank")
    speed = number(found["samples_per_second"])
    return f"Timings of {batches} on {ranks}, {speed} samples a second"


def _table(records: Sequence[Record], shown: Sequence[Column]) -> list[str]:
    return columns(rows(records, shown)) if records else []
