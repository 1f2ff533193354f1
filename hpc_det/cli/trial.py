"""hpc-det trial: one trial of an experiment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click

from hpc_det.cli import describe_trial
from hpc_det.cli.arguments import any_trial_argument, trial_argument
from hpc_det.cli.commands import Group
from hpc_det.cli.experiment.download import copy, of_one_trial, output_dir
from hpc_det.cli.experiment.list_checkpoints import best_option, show_checkpoints
from hpc_det.cli.experiment.logs import LogChoices, log_options, print_trial
from hpc_det.cli.experiment.stop import kill_trial
from hpc_det.cli.output import Column, Output, Record, column, output_options, rows, show
from hpc_det.errors import printable
from hpc_det.store.folders import TrialFolder
from hpc_det.store.metrics import read_reports
from hpc_det.view.checkpoints import of_trial, set_aside_in
from hpc_det.view.formatting import (
    NONE,
    columns,
    count,
    duration,
    iso,
    length_in_words,
    number,
    percent,
    quantity,
    section,
    values_in_words,
)
from hpc_det.view.performance.profile import profile as profile_record
from hpc_det.view.performance.system import GPU_UNITS, UNITS
from hpc_det.view.state import ExperimentView, effective_config


@click.group(cls=Group)
def trial() -> None:
    """Look at one trial of an experiment."""


@trial.command()
@any_trial_argument
@click.option("--metrics", "with_metrics", is_flag=True, help="Every report of its metrics, and nothing else.")
@output_options
def describe(trial: TrialFolder, with_metrics: bool, output: Output) -> None:
    """Describe a trial: its state, hyperparameters, attempts, metrics and checkpoints.

    The state is QUEUED, RUNNING, PAUSED, COMPLETED, ERROR, INVALID or CANCELED. PAUSED: the searcher may want
    more of it; INVALID: it said that its hyperparameters cannot work.

    \b
    Example:
      hpc-det trial describe 12/7 --metrics
      hpc-det trial describe 12/7 --json
      {"id": 7, "state": "PAUSED", "worker": null, "job_id": "4711_3",
       "hyperparameters": {"lr": 0.01}, "seed": 1729,
       "batches": 100, "total_batches": 100,
       "training": {"loss": 0.1}, "validation": {"accuracy": 0.96},
       "best": {...}, "profile": "well used: ...",
       "checkpoints": [...], "set_aside": [], "attempts": [...]}
    `worker` is who trains it now. `profile` is the verdict of `hpc-det trial profile`,
    unless there is none, or too much to read for it. What the last keys hold stands in
    `hpc-det experiment describe --help`.
    """
    if with_metrics:
        output.table(reports_of(trial), REPORT_COLUMNS, REPORT_KEYS)
        return
    found = describe_trial.of(trial)
    if output.is_for_people:
        show(describe_trial.in_words(found))
    else:
        output.details([describe_trial.as_json(found)])


@trial.command()
@any_trial_argument
@output_options
def profile(trial: TrialFolder, output: Output) -> None:
    """Say where the time of a trial goes, and what to do about it.

    A verdict (data loader bound, copy bound, communication bound, checkpoint bound, validation bound, callback bound,
    loop bound, slow rank, idle GPUs, well used), the share of the time that it stands on, and settings to try. Then
    what was measured: timings as the mean over ranks with the longest of them, and system metrics, which are of whole
    nodes with whoever works there. A trial is measured while `profiling.enabled` is true; of another one only saves
    and validations are known.

    \b
    Example:
      hpc-det trial profile 12/7
      hpc-det trial profile 12/7 --csv
      hpc-det trial profile 12/7 --json
      {"id": 7, "verdict": "data loader bound", "share": 0.62, "why": "...",
       "rank": null, "advice": [{"text": "...", "setting": "..."}],
       "also": [], "notes": [], "ranks": 2, "batches": 400,
       "samples_per_second": 640.0, "parts": {"loading": 24.8, ...},
       "timings": [{"timing": "dataloader_next", "mean_s": 24.8,
                    "share": 0.62, "batch_s": 0.062, "longest_s": 25.0,
                    "longest_rank": 1, "longest_host": "n1"}, ...],
       "nodes": [{"host": "n1", "samples": 40,
                  "metrics": {"cpu_util": {"mean": 40.0, "min": ...}},
                  "gpus": {"GPU-...": {"util": {...}}}}]}
    `rank` is the only one with which it is so, and which the others wait for. `also` holds other verdicts, smaller
    ones. `parts` are seconds of the slowest rank. Units are seconds, bytes and bytes a second; usage is in percent.
    """
    found = profile_of(trial)
    if output.is_for_people:
        show(profile_in_words(trial, found))
    elif output.as_csv:
        output.table(measures(found), (), MEASURE_KEYS)
    else:
        output.details([found])


@trial.command("list-checkpoints")
@any_trial_argument
@best_option
@output_options
def list_checkpoints(trial: TrialFolder, best: int | None, output: Output) -> None:
    """List the checkpoints of a trial, the newest first.

    \b
    Example:
      hpc-det trial list-checkpoints 12/7
    """
    config = effective_config(trial.experiment())
    found, set_aside = of_trial(trial, config), set_aside_in(trial, config)
    show_checkpoints(found, set_aside, config["searcher"], best, output)


@trial.command()
@any_trial_argument
@output_dir
@click.option("--best", is_flag=True, help="The one with the best validation, by the searcher's metric.")
@click.option("--latest", is_flag=True, help="The newest one; this is the default.")
@click.option("--uuid", metavar="UUID", help="This one.")
def download(trial: TrialFolder, target: Path, best: bool, latest: bool, uuid: str | None) -> None:
    """Copy a checkpoint of a trial, and print its folder.

    Every byte is compared with the checksums of the manifest, and nothing is overwritten.

    \b
    Example:
      hpc-det trial download 12/7 --best -o best
    """
    if best + latest + (uuid is not None) > 1:
        raise click.UsageError("give only one of --best, --latest and --uuid")
    copy([of_one_trial(trial, uuid, best=best)], target)


@trial.command()
@trial_argument
def kill(trial: TrialFolder) -> None:
    """End one trial now, without another checkpoint. The other trials of its experiment go on.

    \b
    Example:
      hpc-det trial kill 13/1
    """
    show(kill_trial(trial))


@trial.command()
@any_trial_argument
@log_options
def logs(trial: TrialFolder, choices: LogChoices) -> None:
    """Print what the ranks of a trial and its attempts printed, merged by time.

    More stands in `hpc-det experiment logs --help`.

    \b
    Example:
      hpc-det trial logs 12/7 --follow --rank 0
      hpc-det trial logs 12/7 --tail 100 --timestamps
    """
    print_trial(trial, choices)


REPORT_KEYS = "time attempt kind batches metrics"
"""Of a record."""
REPORT_COLUMNS = (
    column("TIME", "time"),
    column("ATTEMPT", "attempt"),
    column("KIND", "kind"),
    column("BATCHES", "batches"),
    Column("METRICS", lambda record: values_in_words(record["metrics"])),
)


def reports_of(trial: TrialFolder) -> list[Record]:
    """Oldest first, without what was lost and trained again."""
    return [
        {
            "time": iso(report["time"]),
            "attempt": report["attempt"],
            "kind": report["kind"],
            "batches": report["steps"],
            "metrics": report["metrics"],
        }
        for report in read_reports(trial.metrics)
    ]


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


MEASURE_KEYS = "measure unit host gpu mean min max share batch_s rank"
"""Of a measure."""


def profile_of(trial: TrialFolder) -> Record:
    """The record that `--json` prints."""
    return {"id": trial.id, **profile_record(ExperimentView(trial.experiment()), trial)}


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


def profile_in_words(trial: TrialFolder, found: Record) -> str:
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
